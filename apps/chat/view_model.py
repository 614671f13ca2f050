"""What the app shows of a runtime: collected in the runtime's thread, drawn in the app's."""

from dataclasses import dataclass

from ruvmlx.errors import NotFound
from ruvmlx.runtime import LearnStatus, Runtime, Turn
from ruvmlx.text import one_line

from .mentions import without_files
from .options import ChatOptions, start_place


def learn_status(runtime: Runtime) -> LearnStatus | None:
    """What was learned so far; None without an adapter."""
    try:
        return runtime.status()
    except NotFound:
        return None


@dataclass(frozen=True)
class Standing:
    """What was learned, and each reply's rating, as they are in the store. Other processes may rate, too.
    left_out: ids of the messages for which the context has no room any more; `summed_up` of them are in the
    summary."""

    learned: LearnStatus | None
    ratings: dict[str, str | None]  # reply id -> rating, of one chat
    left_out: frozenset[int] = frozenset()
    summed_up: int = 0

    @classmethod
    def of(cls, runtime: Runtime, session: str) -> "Standing":
        turns = runtime.chats.turns(session)
        ratings = {turn.reply_id: turn.rating for turn in turns if turn.reply_id}
        room = runtime.chats.room(session, turns, runtime.settings.max_tokens)
        return cls(learn_status(runtime), ratings, room.left_out, room.summed_up)

    @property
    def version(self) -> int:
        return self.learned.adapter_version if self.learned else 0


@dataclass(frozen=True)
class Opened:
    """What the app shows of a runtime that has just been opened, or of a new session."""

    session: str
    message: int | None  # where to begin; None: at the end
    turns: list[Turn]
    model: str
    backend: str
    caveat: str  # which part of the machine is not used, and why; "" if all is
    max_context: int
    learned: LearnStatus | None
    said: list[str]  # the user's earlier messages in all chats, the newest first

    @classmethod
    def of(cls, runtime: Runtime, options: ChatOptions) -> "Opened":
        session, message = start_place(runtime, options)
        return cls(
            session=session,
            message=message,
            turns=runtime.chats.turns(session),
            model=one_line(runtime.model.name),
            backend=f"{runtime.backend.name} · {runtime.backend.kernels}",
            caveat=one_line(runtime.backend.caveat),
            max_context=runtime.model.context,
            learned=learn_status(runtime),
            said=[without_files(text)[0] for text in runtime.chats.asked_before()],
        )
