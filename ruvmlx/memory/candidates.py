"""This module finds the models from which `--model auto` chooses: models on this machine that fit into the
memory together."""

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..backends.select import Choice, describe, for_model
from ..errors import ModelNotFound, RuvmlxError, UsageError
from ..models.config.header_facts import Facts
from ..models.config.model import writes_nothing
from ..models.find.local import local_paths, readable_models, survey
from ..models.find.resolve import find_model
from ..models.find.starter import STARTER_NAMES
from ..progress import QUIET, Watch
from ..settings import AUTO, Settings, resolve_one
from ..text import size
from .load_plan import PROGRAM, MachineMemory, Need

MOST_MODELS = 3  # the number of models of `auto` if the setting auto_models names none
STEP = 1.5  # two models that `auto` takes by itself differ at least by this factor in their parameters


@dataclass(frozen=True)
class AutoModel:
    """A model that `auto` can open. name: the name that opens it."""

    name: str
    facts: Facts
    need: Need

    @property
    def own_bytes(self) -> int:
        """The planned memory of the model in bytes, without the memory that all models share."""
        return self.need.total - PROGRAM


@dataclass(frozen=True)
class AutoModels:
    """The models of `auto`, the smallest first. limit: the most bytes of memory for all of them together.
    left_out: the names of the models in `auto_models` for which there is no memory. known: the number of
    models from which these models were chosen."""

    models: Sequence[AutoModel]
    limit: int
    left_out: Sequence[str] = ()
    known: int = 1

    @property
    def best(self) -> AutoModel:
        """The largest model."""
        return self.models[-1]

    @property
    def note(self) -> str:
        """A line for the user about models that are left out, or about a missing choice; "": all is well."""
        said = ""
        if self.left_out:
            names = ", ".join(self.left_out)
            said = f"auto: there is no memory for {names} ({size(self.limit)} for all models together)"
        elif len(self.models) == 1 and self.known == 1:
            said = "auto: no other model is known; name some in the setting auto_models"
        elif len(self.models) == 1:
            said = "auto: no other model on this machine is clearly larger and fits beside it"
        only = f"{self.best.name} answers every question" if len(self.models) == 1 else ""
        return "; ".join(filter(None, (said, only)))


def find_candidates(settings: Settings, watch: Watch = QUIET) -> AutoModels:
    """Return the models of the setting auto_models that fit into the memory together, in the order of the
    setting; without the setting, at most MOST_MODELS models of this machine and the default model of the
    settings. Raises ModelNotFound if there is no model.

    The function reads the headers of the models' files. It downloads only a model that auto_models names.
    """
    backend = describe(settings.backend, settings.threads)
    limit = MachineMemory.now(backend, settings.memory_bytes).limit
    if settings.auto_models:
        return _models_by_name(settings, backend, limit, watch)
    found = [_candidate(facts, name, backend, settings) for name, facts in _readable().items()]
    if not found:
        raise ModelNotFound("auto finds no model on this machine; `ruvmlx pull` fetches one.")
    return AutoModels(_by_size(_spread(found, limit)), limit, known=len(found))


def single_model(settings: Settings) -> Settings:
    """Return the settings for work with one model: the largest model of `auto` takes the place of `auto`."""
    if settings.model != AUTO:
        return settings
    return replace(settings, model=find_candidates(settings).best.name)


def _readable() -> dict[str, Facts]:
    """Return {name: facts} of the models on this machine and of the default model of the settings, if this is
    a path that the list of models does not have."""
    found = {facts.name: facts for facts in readable_models() if not facts.embeds}
    default = resolve_one("model").value
    path = os.path.expanduser(default or "")
    is_path = default != AUTO and os.path.exists(path)
    if is_path and not any(os.path.samefile(path, facts.path) for facts in found.values()):
        with contextlib.suppress(RuvmlxError):  # a model that cannot be read is no candidate
            found[default] = _facts(default, QUIET)
    return found


def _candidate(facts: Facts, name: str, backend: Choice, settings: Settings) -> AutoModel:
    chosen = for_model(backend, "auto", facts.shape)
    return AutoModel(name, facts, Need.of(facts, chosen, settings.max_context))


def _models_by_name(settings: Settings, backend: Choice, limit: int, watch: Watch) -> AutoModels:
    names = [name.strip() for name in (settings.auto_models or "").split(",") if name.strip()]
    if not names or AUTO in names:
        raise UsageError(
            f"auto_models = {settings.auto_models!r}: expected names of models, as in starter,owner/name."
        )
    found = [_candidate(_facts(name, watch), name, backend, settings) for name in dict.fromkeys(names)]
    kept = fitting(found, limit) or found[:1]
    left_out = [candidate.name for candidate in found if candidate not in kept]
    return AutoModels(_by_size(kept), limit, left_out)


def _facts(name: str, watch: Watch) -> Facts:
    path = None if name in STARTER_NAMES else local_paths().get(name)
    found = find_model(name, watch)
    facts = survey(found.name, path or found.path)
    if not facts.shape.writes:
        raise UsageError(f"auto_models: {writes_nothing(name)}")
    return facts


def _by_size(found: Iterable[AutoModel]) -> list[AutoModel]:
    return sorted(found, key=lambda candidate: (candidate.facts.parameters, candidate.name))


def fitting(found: Iterable[AutoModel], limit: int) -> list[AutoModel]:
    """Return the candidates that fit together into `limit` bytes. A candidate is left out if it does not fit
    beside those before it."""
    kept: list[AutoModel] = []
    for candidate in found:
        if PROGRAM + sum(other.own_bytes for other in [*kept, candidate]) <= limit:
            kept.append(candidate)
    return kept


def _spread(found: Sequence[AutoModel], limit: int) -> list[AutoModel]:
    """Return at most MOST_MODELS models of different sizes: the starter (without it, the smallest model),
    then the largest models that fit beside it."""
    ordered = _by_size(found)
    first = next((c for c in ordered if c.name in STARTER_NAMES), ordered[0])
    kept = [first]
    for candidate in reversed(ordered):
        together = [*kept, candidate]
        if len(kept) < MOST_MODELS and _differs(candidate, kept) and fitting(together, limit) == together:
            kept = together
    return kept


def _differs(candidate: AutoModel, kept: Sequence[AutoModel]) -> bool:
    """Return True if the model is larger than the first model, and no size is much like its size."""
    mine, sizes = candidate.facts.parameters, [other.facts.parameters for other in kept]
    return mine > sizes[0] and all(max(mine, size) >= STEP * min(mine, size) for size in sizes)
