"""This module holds the runtime (an open model with its store) in use, and can replace the runtime by one
with another model."""

import gc
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import Interrupted, ModelClosed, RuvmlxError, UsageError, error_line
from ..memory.load_plan import Plan
from ..models.config.header_facts import Facts
from ..models.find.variants import FileChoice
from ..platform import memory
from ..platform.cpu import memory_of_models
from ..progress import QUIET, Progress, Watch
from ..runtime import Runtime


@dataclass(frozen=True)
class Opener:
    """An opener holds a function that opens a runtime, and the names of the first model and adapter.

    open(model, adapter, watch): the function; the names are values of the settings `model` and `adapter`.
    model, adapter: the names for the first runtime. first_run: True if this machine had no data of ruvmlx
    before.
    """

    open: Callable[[str | None, str | None, Watch], Runtime]
    model: str | None = None
    adapter: str | None = "default"
    first_run: bool = False

    def __call__(self) -> Runtime:
        return self.open(self.model, self.adapter, QUIET)

    @classmethod
    def of(cls, open_runtime: "OpenRuntime") -> "Opener":
        """Return `open_runtime` if it is an Opener; else an opener that calls this plain function and cannot
        open another model."""
        return open_runtime if isinstance(open_runtime, Opener) else cls(_open_only(open_runtime))


OpenRuntime = Callable[[], Runtime] | Opener


def _open_only(open_runtime: Callable[[], Runtime]) -> Callable[[str | None, str | None, Watch], Runtime]:
    def opens(model: str | None, adapter: str | None, watch: Watch) -> Runtime:
        if model is not None:
            raise UsageError("this chat was opened with one model only; start another one with --model.")
        return open_runtime()

    return opens


class ModelUnchanged(RuvmlxError):
    """This error means that the program could not switch to another model. The old model stays in use."""

    def __init__(self, why: Exception) -> None:
        super().__init__(f"{error_line(why)} The model stays as it was.")
        self.exit_code = getattr(why, "exit_code", 1)


class StoppableWatch(Watch):
    """A watch that passes all reports to another watch. After a thread has set the event `stopped`, each
    method except `note_facts` raises `Interrupted`."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.stopped, self._fetches = threading.Event(), False

    def note_facts(self, facts: Facts) -> None:
        self._watch.note_facts(facts)

    def note_choice(self, choice: FileChoice) -> None:
        self._fetches = True
        self._raise_if_stopped()
        self._watch.note_choice(choice)

    def note_plan(self, plan: Plan) -> None:
        self._fetches = self._fetches or plan.facts.to_fetch > 0
        self._raise_if_stopped()
        self._watch.note_plan(plan)

    def progress(self, progress: Progress) -> None:
        self._raise_if_stopped()
        self._watch.progress(progress)

    def _raise_if_stopped(self) -> None:
        if self.stopped.is_set():
            kept = "; what was fetched so far is kept" if self._fetches else ""
            raise Interrupted(f"stopped before the model was open{kept}.")


class _PlanWatch(Watch):
    """A watch that passes all reports to another watch. The watch also stores the memory plan and calls
    then(plan)."""

    def __init__(self, watch: Watch, then: Callable[[Plan], None] = lambda plan: None) -> None:
        self._watch, self._then = watch, then
        self.plan: Plan | None = None

    def note_facts(self, facts: Facts) -> None:
        self._watch.note_facts(facts)

    def note_choice(self, choice: FileChoice) -> None:
        self._watch.note_choice(choice)

    def note_plan(self, plan: Plan) -> None:
        self.plan = plan
        self._watch.note_plan(plan)
        self._then(plan)

    def progress(self, progress: Progress) -> None:
        self._watch.progress(progress)


class ModelHolder:
    """The holder of the runtime in use, which can switch to another model. Call the methods only in the
    runtime's thread.

    If the machine has enough memory, the old runtime stays open until the new runtime is ready. With less
    memory, the holder closes the old runtime when the plan shows that the new model will then fit and needs
    no download. If the new model then fails to load, the holder opens the old model again. The chat is in the
    store, and the new model reads it again.
    """

    def __init__(self, opener: Opener) -> None:
        self.opener, self.model = opener, opener.model
        self.runtime: Runtime | None = None  # the runtime in use; None: no runtime is open
        self._adapter = opener.adapter  # the name of the adapter with which the runtime opens
        self.plan: Plan | None = None  # the memory plan of the runtime in use; None: there is no plan
        self.leaving = False  # True if the program closes; the holder then opens no runtime again

    @classmethod
    def of_runtime(cls, runtime: Runtime) -> "ModelHolder":
        """Return a holder of an open runtime that the holder cannot replace."""
        holder = cls(Opener.of(lambda: runtime))
        holder.open()
        return holder

    @property
    def first_run(self) -> bool:
        return self.opener.first_run

    @property
    def opened_runtime(self) -> Runtime:
        """The open runtime. Raises ModelClosed if no runtime is open."""
        if self.runtime is None:
            raise ModelClosed("no model is open. Choose a model, or start the program again.")
        return self.runtime

    def open(self, watch: Watch = QUIET) -> None:
        """Open the first runtime, or after `release` a runtime of the same model and adapter."""
        plan_watch = _PlanWatch(watch)
        self.runtime = self.opener.open(self.model, self._adapter, plan_watch)
        self.plan = plan_watch.plan

    def switch(self, model: str, session: str, watch: Watch = QUIET) -> None:
        """Switch to another model. Use the new model's adapter with the same name as the adapter in use.

        Raises ModelUnchanged if the switch fails; the old model then stays in use. If the holder closed the
        old runtime to free memory and cannot open it again, `runtime` is None, and the error of this attempt
        is raised. `runtime` is also None if the program closes meanwhile.
        """
        adapter = _adapter_of(self.opened_runtime)
        held = self.plan.need.total if self.plan else 0
        plan_watch = _PlanWatch(watch, lambda plan: self._make_room(plan, held))
        try:
            new = self._check_runtime(session, self.opener.open(model, adapter, plan_watch))
        except Exception as error:  # noqa: BLE001 - files, memory and templates fail in many classes
            if self.runtime is None and not self.leaving:
                self.runtime = self.opener.open(self.model, adapter, QUIET)
            raise ModelUnchanged(error) from None
        try:
            self.release()
        finally:  # the new runtime is ready, also if the old one cannot save all its data
            self.runtime, self.model, self.plan = new, model, plan_watch.plan

    def _make_room(self, plan: Plan, held: int) -> None:
        """Close the runtime in use if the new model fits into the memory only without this runtime and needs
        no download. held: the bytes of memory of the runtime in use."""
        need, memory = plan.need.total, plan.memory
        most = memory_of_models(memory.total, plan.backend.device == "metal")
        beside = plan.fits and need + held <= most
        if not (plan.facts.to_fetch or beside or need > memory.limit + held):
            self.release()

    @staticmethod
    def _check_runtime(session: str, runtime: Runtime) -> Runtime:
        """Return the runtime if its model's chat template accepts the chat; else close the runtime and raise
        the error."""
        try:
            runtime.chats.check_chat(session)
        except BaseException:
            runtime.close()
            raise
        return runtime

    def release(self) -> None:
        """Close the runtime in use and free all its memory."""
        if self.runtime is not None:
            self._adapter = _adapter_of(self.runtime)
        try:
            self.close()
        finally:
            gc.collect()
            if "mlx.core" in sys.modules:
                sys.modules["mlx.core"].clear_cache()
            memory.give_back()

    def close(self) -> None:
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            runtime.close()


def _adapter_of(runtime: Runtime) -> str | None:
    """Return the name of the adapter that the runtime uses; None: the original model."""
    label = runtime.learning.label
    return label.rpartition("@")[0] if label else None
