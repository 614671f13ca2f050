"""The holder of the runtime in use."""

from types import SimpleNamespace

import pytest

from ruvmlx.host.model_holder import ModelHolder, Opener


@pytest.mark.parametrize("used", ["work", None], ids=["another adapter", "the original model"])
def test_a_model_that_was_closed_opens_again_with_its_adapter(used):
    """The user chose the adapter after the first start."""
    opened = []

    def opens(model, adapter, watch):
        opened.append(adapter)
        label = adapter and f"{adapter}@m"
        return SimpleNamespace(learning=SimpleNamespace(label=label), close=lambda: None)

    holder = ModelHolder(Opener(opens, "m", "default"))
    holder.open()
    holder.opened_runtime.learning.label = used and f"{used}@m"
    holder.release()
    assert holder.runtime is None
    holder.open()
    assert opened == ["default", used]
