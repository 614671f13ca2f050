"""The open chat, and the outcome of a command: the same for the app and plain mode.

A step is what a slash command does with the runtime. It runs in the runtime's thread and returns an
`Outcome`; it does not know how that is shown.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ruvmlx.engine.types import GenerationResponse
from ruvmlx.host.serving import BeginReply
from ruvmlx.kv.cache import KVStats
from ruvmlx.platform.sensors import Sensors
from ruvmlx.runtime import PreferenceResult, RatingResult, Runtime, Turn

from .compare import Candidate
from .options import ChatOptions
from .tools.chat_tools import ChatTools


@dataclass
class ChatState:
    """The open chat. A step may change it while the front end waits."""

    options: ChatOptions
    session: str = ""  # its id; "" until a runtime is open
    system: str | None = None  # its system prompt
    selected: int | None = None  # message id of the selected reply
    candidates: list[Candidate] = field(default_factory=list)  # the two replies of the newest comparison
    response: GenerationResponse | None = None  # the newest reply, with its figures
    lesson: RatingResult | PreferenceResult | None = None  # what was learned last
    left_out: int = 0  # oldest messages that the model did not read any more, as it was told last
    told_full: bool = False  # the user was told that the context is nearly full
    listed_chats: list[str] = field(default_factory=list)  # ids, as /chats numbered them last
    found_messages: dict[str, int] = field(default_factory=dict)  # of a search: chat -> message
    listed_models: list[str] = field(default_factory=list)  # names, as /models numbered them last
    sensors: Sensors = field(default_factory=Sensors)
    tools: ChatTools = field(default_factory=ChatTools)
    cancel: threading.Event = field(default_factory=threading.Event)  # ends a step that waits for a server

    def __post_init__(self) -> None:
        self.tools.may_run = self.options.tools
        self.system = self.system or self.options.system

    def open_chat(self, session: str, system: str | None) -> None:
        """Another chat is shown from now on: forget what belonged to the one before."""
        self.session, self.system = session, system
        self.selected, self.candidates, self.response, self.left_out = None, [], None, 0
        self.told_full = False
        self.tools.turn_all_off()

    def model_changed(self) -> None:
        """Forget what belongs to the former model."""
        self.candidates, self.response = [], None

    @property
    def kv(self) -> KVStats | None:
        """The KV cache after the newest reply."""
        return self.response.kv if self.response else None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step. `notice` and `flash` are for the app; `words`, `reply`, `then` and `model` for
    plain mode; the other fields for both."""

    words: str = ""  # the answer, to be read aloud; may have several lines
    notice: str = ""  # the answer, shown in the conversation
    flash: str = ""  # the answer for the status line, where it stays for `seconds`
    seconds: float = 3.0
    opens: str = ""  # the id of the session to switch to
    message: int | None = None  # where to open it, or the message of the open chat to show
    retell: bool = False  # print that session's earlier messages
    learned: bool = False  # ratings or the adapter's version have changed
    reply: BeginReply | None = None  # a reply to stream, after `words`
    then: "Step | None" = None  # another step, after `reply`
    model: str = ""  # the name of the model to switch to
    leaves: bool = False


Step = Callable[[Runtime, ChatState, str], Outcome]  # the str: the text after the command


def told(text: str) -> Outcome:
    """The same answer in both modes."""
    return Outcome(words=text, notice=text)


def system_prompt_of(turns: list[Turn]) -> str | None:
    return next((turn.content for turn in turns if turn.role == "system"), None)
