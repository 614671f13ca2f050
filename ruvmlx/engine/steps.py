"""This module makes one step of several replies: it decodes the last token of each reply, then draws and
records the next token of each reply. An error in the draw of one reply ends only this reply."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..backends.base import Together
from ..kernels.replies import ReplyWork
from .run import EngineParts, Run
from .side_change import on_living_side


def draw_all(engine: EngineParts, running: Sequence[Run]) -> list[tuple[Run, Exception]]:
    """Draw and record the next token of every run. Several runs work in parallel if the backend is a
    `Together`. Returns each run that failed, with its error."""
    backend, failed = engine.backend, dict[Run, Exception]()
    parallel = backend if len(running) > 1 and isinstance(backend, Together) else None
    if parallel:
        _work_together(parallel, running, _draw_work, failed)
    for run in running:
        if run not in failed:
            with _note_failure(failed, run):
                run.draw(record=parallel is None)
    if parallel:
        _work_together(parallel, running, Run.record_work, failed)
    return list(failed.items())


def _draw_work(run: Run) -> list[ReplyWork]:
    work = run.draw_work()
    return [] if work is None else [work]


def _work_together(
    parallel: Together,
    running: Sequence[Run],
    work_of: Callable[[Run], list[ReplyWork]],
    failed: dict[Run, Exception],
) -> None:
    """Run the kernel calls of all runs in parallel, and add each run that failed to `failed`. work_of: a
    function that returns the calls of a run"""
    works = list[tuple[Run, ReplyWork]]()
    for run in running:
        if run not in failed:
            with _note_failure(failed, run):
                works += [(run, work) for work in work_of(run)]
    parallel.together([work for _, work in works])
    for run, work in works:
        if run not in failed:
            with _note_failure(failed, run):
                work.finish()


@contextmanager
def _note_failure(failed: dict[Run, Exception], run: Run) -> Iterator[None]:
    """Add the run to `failed` if the block raises an exception."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the error goes to the sink
        failed[run] = error


def decode_one(engine: EngineParts, running: Sequence[Run]) -> None:
    """Decode the last token of every run in one step of the backend."""
    tokens, own = [run.ids[-1] for run in running], [run.adapter for run in running]
    steps = on_living_side(
        running,
        lambda: engine.backend.decode_batch(tokens, [run.session.cache for run in running], own),
    )
    for run, step in zip(running, steps, strict=True):
        run.take(step)
