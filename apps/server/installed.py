"""This module lists the models on this machine that a request can name, and the memory that each model
needs."""

from collections.abc import Mapping
from pathlib import Path

from ruvmlx.backends.select import Choice, describe, for_model
from ruvmlx.errors import RuvmlxError
from ruvmlx.memory.load_plan import MachineMemory, Need
from ruvmlx.models.config.header_facts import Facts
from ruvmlx.models.find.local import local_paths, survey
from ruvmlx.settings import Settings

from .memory_share import MemoryShare


class InstalledModels:
    """The models on this machine. The object reads only the headers of a model's files, and reads them again
    only if the modification time of the model's file or folder has changed. A call of `all` can take a
    second, so call it in a separate thread."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self._choice: Choice = describe(settings.backend, settings.threads)
        self._known: dict[tuple[Path, int], Facts | None] = {}

    def all(self) -> Mapping[str, Facts]:
        """Return the models that the server can open, by name. Model files that cannot be read are left
        out."""
        found = {name: self._facts(name, path) for name, path in local_paths().items()}
        return {name: facts for name, facts in found.items() if facts is not None}

    def need(self, facts: Facts) -> Need:
        """Return the plan of the memory that the model will take when it is open."""
        settings = self._settings
        backend = for_model(self._choice, settings.backend, facts.shape)
        return Need.of(facts, backend, settings.max_context)

    def share(self) -> MemoryShare:
        """Return the memory limit of all open models together. The limit is the user's setting
        `server_memory`, or else `memory_limit`, or else the memory that one model can use (a share of the
        free memory; on Metal, of all memory)."""
        settings = self._settings
        fixed = (settings.server_memory or settings.memory_limit or 0) << 20
        limit = fixed or MachineMemory.now(self._choice).limit
        return MemoryShare(limit, bool(fixed), (settings.kv_budget or 0) << 20)

    def context(self, facts: Facts) -> int:
        """Return the context length of the model: the maximum number of tokens of the prompt and the reply
        together."""
        most = facts.shape.max_context
        return min(most, self._settings.max_context or most)

    def _facts(self, name: str, path: Path) -> Facts | None:
        try:
            key = path, path.stat().st_mtime_ns
            if key not in self._known:
                self._known[key] = survey(name, path)
            return self._known[key]
        except (RuvmlxError, OSError):
            return None
