"""Consolidation of the starter model, native backend: it improves the fit, stays within its limits and can be
undone."""

import numpy as np

from ruvmlx.backends.select import open_backend
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.models.config.model import Message
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings as RuntimeSettings
from ruvmlx.sona.background import TrainingSettings
from ruvmlx.sona.instant import KL_CAP
from ruvmlx.store import Store


def test_twelve_short_replies_are_consolidated(starter, home, whole_text):
    """Twelve short replies, three steps on the last four layers."""
    backend = open_backend("native", starter)
    with Runtime(Store(home / "ruvmlx.db"), starter, backend, RuntimeSettings(kv_disk=None)) as runtime:
        for i in range(12):
            request = GenerationRequest(
                request_id=f"reply-{i}",
                messages=[Message("user", f"Name a {('fruit', 'metal', 'river')[i % 3]}.")],
                max_new_tokens=12,
                sampling=Sampling(seed=i),
            )
            for _ in runtime.writer.generate(request):
                pass
            runtime.rate(request.request_id, "up" if i % 3 else "down")
        before = runtime.backend.head(np.ones((1, starter.config.hidden_size), np.float32))
        losses = []
        settings = TrainingSettings(steps=3, lr=3e-4, depth=0.13)
        report = runtime.learning.consolidate(lambda done, total, loss: losses.append(loss), None, settings)
        assert np.isnan(losses[0]) and len(losses) == 4  # progress begins before the first step
        assert np.isfinite(losses[1:]).all() and report["held_out"] >= 2
        assert report["promoted"] == (runtime.status().adapter_version == 13)
        if report["promoted"]:
            assert report["loss_after"] < report["loss_before"] and report["kl"] <= KL_CAP
            layers = {layer for module, layer in runtime.learner.base.pairs if module != "lm_head"}
            assert layers == {26, 27, 28, 29}
        runtime.rollback(12)
        runtime.learner.sync()
        after = runtime.backend.head(np.ones((1, starter.config.hidden_size), np.float32))
        np.testing.assert_array_equal(after, before)
