"""The runtime in use, and how another model takes its place. All of it runs in the runtime's thread.

Both are open side by side for a moment, unless the machine has no room for that; then the old one is closed
as soon as it is known that the new one will fit, and opened again if that comes to nothing. The chat is the
store's: the model that comes reads it anew.
"""

import gc
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ruvmlx.errors import Interrupted, RuvmlxError, UsageError
from ruvmlx.models.facts import Facts
from ruvmlx.plan import GPU_SHARE, Plan
from ruvmlx.progress import QUIET, Progress, Watch

from . import describe
from .contract import ChatRuntime, OpenRuntime


@dataclass(frozen=True)
class Opener:
    """Opens a runtime: open(model, adapter, watch), the names as in the settings. model, adapter: of the
    first one. first_run: nothing was kept on this machine before."""

    open: Callable[[str | None, str | None, Watch], ChatRuntime]
    model: str | None = None
    adapter: str | None = "default"
    first_run: bool = False

    def __call__(self) -> ChatRuntime:
        return self.open(self.model, self.adapter, QUIET)

    @classmethod
    def of(cls, open_runtime: OpenRuntime) -> "Opener":
        """A plain function opens the one runtime that there is."""
        return open_runtime if isinstance(open_runtime, Opener) else cls(_only(open_runtime))


def _only(open_runtime: OpenRuntime) -> Callable[[str | None, str | None, Watch], ChatRuntime]:
    def opens(model: str | None, adapter: str | None, watch: Watch) -> ChatRuntime:
        if model is not None:
            raise UsageError("this chat was opened with one model only; start another one with --model.")
        return open_runtime()

    return opens


class Unchanged(RuvmlxError):
    """Another model could not be opened; the one in use stays."""

    def __init__(self, why: Exception) -> None:
        super().__init__(f"{describe.error_line(why)} The model stays as it was.")
        self.exit_code = getattr(why, "exit_code", 1)


class _Through(Watch):
    """Tells another watch all that it is told."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def found(self, facts: Facts) -> None:
        self._watch.found(facts)

    def planned(self, plan: Plan) -> None:
        self._watch.planned(plan)

    def progress(self, progress: Progress) -> None:
        self._watch.progress(progress)


class Stoppable(_Through):
    """An opening that ends when `stopped` is set, from any thread."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(watch)
        self.stopped, self._fetches = threading.Event(), False

    def planned(self, plan: Plan) -> None:
        self._fetches = self._fetches or plan.facts.to_fetch > 0
        self._look()
        super().planned(plan)

    def progress(self, progress: Progress) -> None:
        self._look()
        super().progress(progress)

    def _look(self) -> None:
        if self.stopped.is_set():
            kept = "; what was fetched so far is kept" if self._fetches else ""
            raise Interrupted(f"stopped before the model was open{kept}.")


class _Noting(_Through):
    """Remembers the plan."""

    plan: Plan | None = None

    def planned(self, plan: Plan) -> None:
        self.plan = plan
        super().planned(plan)


class Holder:
    """Whoever has the runtime in use asks for it here."""

    def __init__(self, opener: Opener, runtime: ChatRuntime | None = None) -> None:
        self._opener, self.runtime, self.model = opener, runtime, opener.model
        self.plan: Plan | None = None  # of the runtime in use, where it told
        self.leaving = False  # nobody waits for a runtime any more
        self._put_away: frozenset[str] = frozenset()  # chats that wait for the next runtime

    @classmethod
    def fixed(cls, runtime: ChatRuntime) -> "Holder":
        """Of a runtime that is open already, and stays."""
        return cls(Opener.of(lambda: runtime), runtime)

    @property
    def first_run(self) -> bool:
        return self._opener.first_run

    @property
    def opened(self) -> ChatRuntime:
        assert self.runtime is not None, "the app calls only after open()"
        return self.runtime

    def open(self, watch: Watch = QUIET) -> None:
        """The first one."""
        noted = _Noting(watch)
        self.runtime = self._opener.open(self.model, self._opener.adapter, noted)
        self.plan = noted.plan

    def switch(self, model: str, session: str, watch: Watch = QUIET) -> None:
        """Go on with another model, under the adapter of the same name. `Unchanged` where that fails: the
        model in use stays. `runtime` is None only if it had to make room, and cannot be opened any more."""
        label = self.opened.adapter_label
        adapter = label.rpartition("@")[0] if label else None
        room = _MakingRoom(watch, self)
        try:
            new = self._reading(session, self._opener.open(model, adapter, room))
        except Exception as error:  # noqa: BLE001 - files, memory and templates fail in many classes
            if self.runtime is None and not self.leaving:
                self._take(self._opener.open(self.model, adapter, QUIET))
            raise Unchanged(error) from None
        self.give_up()
        self._take(new)
        self.model, self.plan = model, room.plan

    @staticmethod
    def _reading(session: str, runtime: ChatRuntime) -> ChatRuntime:
        """The runtime, if its model's template has a place for what was said; else it is closed."""
        try:
            runtime.chats.check_chat(session)
        except BaseException:
            runtime.close()
            raise
        return runtime

    def _take(self, runtime: ChatRuntime) -> None:
        runtime.deleted_chats.take_over(self._put_away)
        self.runtime, self._put_away = runtime, frozenset()

    def give_up(self) -> None:
        """Close the runtime in use, and give all of its memory back."""
        if self.runtime is not None:
            self._put_away = self.runtime.deleted_chats.hand_over()
            self.runtime.close()
            self.runtime = None
        gc.collect()
        if "mlx.core" in sys.modules:
            sys.modules["mlx.core"].clear_cache()

    def close(self) -> None:
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            runtime.close()


class _MakingRoom(_Noting):
    """Closes the runtime in use if the new one fits without it, and only then."""

    def __init__(self, watch: Watch, holder: Holder) -> None:
        super().__init__(watch)
        self._holder = holder
        self.held = holder.plan.need.total if holder.plan else 0

    def planned(self, plan: Plan) -> None:
        super().planned(plan)
        need, memory = plan.need.total, plan.memory
        beside = plan.fits and need + self.held <= memory.total * GPU_SHARE
        if not (plan.facts.to_fetch or beside or need > memory.limit + self.held):
            self._holder.give_up()
