"""Fixtures of the simulated users' tests."""

import pytest

from apps.prove.trial import Bench


class NoText:
    """Stands in for the neutral text, which the tiny model would read for seconds."""

    def compare(self, adapter):
        return 0.0, 0.0


@pytest.fixture
def bench(tiny, tiny_backend, monkeypatch):
    monkeypatch.setattr("apps.prove.trial.NeutralText", lambda *_: NoText())
    return Bench(tiny, tiny_backend)
