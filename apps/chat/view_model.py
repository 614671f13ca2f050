"""What the app shows of a runtime: gathered in the runtime's thread, drawn in the app's."""

from dataclasses import dataclass

from ruvmlx.runtime import LearnStatus, Turn
from ruvmlx.text import one_line

from .contract import ChatOptions, ChatRuntime, learned, start_session


@dataclass(frozen=True)
class Standing:
    """What was learned, and each reply's rating, as the store has it now: other processes rate, too."""

    learned: LearnStatus | None
    ratings: dict[str, str | None]  # of one chat, by reply id

    @classmethod
    def of(cls, runtime: ChatRuntime, session: str) -> "Standing":
        turns = runtime.chats.turns(session)
        return cls(learned(runtime), {turn.reply_id: turn.rating for turn in turns if turn.reply_id})

    @property
    def version(self) -> int:
        return self.learned.adapter_version if self.learned else 0


@dataclass(frozen=True)
class Opened:
    """What the app shows of a runtime that has just been opened, or of a new session."""

    session: str
    turns: list[Turn]
    model: str
    backend: str
    caveat: str  # what of the machine is not used; ""
    max_context: int
    learned: LearnStatus | None
    said: list[str]  # what the user wrote before, the newest first

    @classmethod
    def of(cls, runtime: ChatRuntime, options: ChatOptions) -> "Opened":
        session = start_session(runtime, options)
        return cls(
            session=session,
            turns=runtime.chats.turns(session),
            model=one_line(runtime.model.name),
            backend=f"{runtime.backend.name} · {runtime.backend.kernels}",
            caveat=one_line(runtime.backend.caveat),
            max_context=runtime.model.config.max_context,
            learned=learned(runtime),
            said=runtime.chats.asked_before(),
        )
