"""The holder of the runtime in use."""

from types import SimpleNamespace

import pytest

from ruvmlx.errors import ModelClosed, StoreError
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


def test_the_new_model_is_in_use_although_the_old_one_cannot_save_its_data():
    def opens(model, adapter, watch):
        def close():
            if model == "old":
                raise StoreError("the disk is full")

        chats = SimpleNamespace(check_chat=lambda session: None)
        return SimpleNamespace(learning=SimpleNamespace(label=None), close=close, chats=chats, name=model)

    holder = ModelHolder(Opener(opens, "old", None))
    holder.open()
    with pytest.raises(StoreError, match="disk is full"):
        holder.switch("new", "chat")
    assert holder.opened_runtime.name == holder.model == "new"


def test_a_call_without_a_model_is_a_line_for_the_user():
    holder = ModelHolder(Opener(lambda *_: None))
    with pytest.raises(ModelClosed, match="no model is open"):
        _ = holder.opened_runtime
