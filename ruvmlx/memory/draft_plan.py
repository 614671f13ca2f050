"""This module opens the draft model (engine/draft_model.py), if the settings name one and the setting
`speculate` is not "off"."""

from ..backends.base import Backend, Drafting
from ..backends.select import describe, open_backend
from ..engine.draft_model import DraftModel, check_vocabulary
from ..errors import UsageError
from ..models.config.model import Model
from ..progress import Progress, Watch
from ..settings import Settings
from .load_plan import Plan, Planning


class _ProgressOnly(Watch):
    """A watch that passes on only the progress of the draft model and not its plan, because the user sees the
    plan of the large model."""

    def __init__(self, watch: Watch):
        self._watch = watch

    def progress(self, progress: Progress) -> None:
        self._watch.progress(progress)


def open_draft_model(
    settings: Settings, large: Model, backend: Backend, plan: Plan | None, watch: Watch
) -> DraftModel | None:
    """Open the draft model of the settings. Return None if the settings name no draft model, or if
    `speculate` is "off".

    large, backend, plan: the model that writes the replies, its backend and its memory plan

    Raises UsageError if the backend cannot check guessed tokens or if the models have different tokens, and
    NotEnoughMemory if both models together do not fit.
    """
    if settings.draft_model is None or settings.speculate == "off":
        return None
    if not isinstance(backend, Drafting):
        raise UsageError(
            f"draft_model is {settings.draft_model}, but the {backend.name} backend cannot check guessed "
            "tokens. Choose --backend native, or leave the draft model out."
        )
    # with two sides, the draft model guesses on the CPU's cores
    name = "native" if settings.backend == "hybrid" else settings.backend
    choice = describe(name, settings.threads)
    planning = Planning(
        _ProgressOnly(watch), choice, settings.draft_model, name, settings.max_context, settings.memory_bytes
    )
    small = planning.load(settings.draft_model)
    check_vocabulary(large, small)
    if planning.plan is not None and plan is not None:
        _check_both(planning.plan, plan)
    opened = open_backend(name, planning.watched_model(small), settings.threads, 0, planning)
    return DraftModel(opened, small.context, min(large.shape.vocab_size, small.shape.vocab_size))


def _check_both(small: Plan, large: Plan) -> None:
    """Raise NotEnoughMemory if the draft model does not fit beside the large model. The weights of the large
    model are in memory, so the free memory does not include them. The draft model learns nothing."""
    own, need, memory = small.need, large.need, small.memory
    held = own.work - need.cache - need.work
    if memory.chosen:
        held = min(held, own.work + memory.chosen - need.total - memory.limit)
    small.check(held)
