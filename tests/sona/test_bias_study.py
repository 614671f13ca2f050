"""The study of a plain bias, on the tiny model: its searches find what they say."""

import numpy as np
import pytest

from . import bias_study
from .feedback import reply


def test_both_forms_are_compared_at_the_same_kl(open_tiny):
    with open_tiny() as runtime:
        for seed in range(3):
            runtime.rate(reply(runtime, seed=seed), "down" if seed % 2 else "up")
        probe = runtime.learner.probe
        row = probe.coordinates.columns(runtime.learner.micro.lora_b)[:1]
        text = probe._read(np.ones((len(probe.contexts), 1), np.float32))
        scale, rise = bias_study.rise_at(text, row, 0.02)
        found = text.distance(row, scale)
        assert found[0] == pytest.approx(0.02, rel=1e-3) and found[1] == rise
        assert bias_study.kl_within(text, row, 10.0, scale) == found[0]
        half = bias_study.kl_within(text, row, 0.25 * rise, scale)
        assert rise <= 0 or 0 < half < found[0]
        both = bias_study.study(probe, row, 0.02)
        assert both["a plain bias"][0] == rise and len(both) == 2
