"""This module has the state of the open chat and the outcome of a command, for the app and plain mode.

A step is a function that does the work of a slash command with the runtime. The step runs in the runtime's
thread and returns an `Outcome`. The app or plain mode shows the outcome to the user.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ruvmlx.engine.types import GenerationResponse
from ruvmlx.host.serving import BeginReply
from ruvmlx.kv.cache import KVStats
from ruvmlx.platform.sensors import Sensors
from ruvmlx.runtime import PreferenceResult, RatingResult, Runtime, Turn

from .compare import ReplyComparison
from .options import ChatOptions
from .tools.chat_tools import ChatTools


@dataclass
class ChatState:
    """The state of the open chat. A step can change the state, because the app or plain mode waits for the
    step."""

    options: ChatOptions
    session: str = ""  # the id of the chat; "" until a runtime is open
    system: str | None = None  # the system prompt of the chat
    selected: int | None = None  # the message id of the selected reply
    # the newest /compare; fewer than two candidates if the model did not finish both replies
    comparison: ReplyComparison = field(default_factory=ReplyComparison)
    response: GenerationResponse | None = None  # the newest reply of the model, with its figures
    lesson: RatingResult | PreferenceResult | None = None  # the result of the newest rating or choice
    # plain mode: the number of oldest messages that the model did not read, as of the newest reply
    left_out: int = 0
    told_full: bool = False  # plain mode: True if the context was nearly full after the newest reply
    # ids of all chats, in the order in which the last /chats numbered the chats
    listed_chats: list[str] = field(default_factory=list)
    # the newest message that the last /chats WORDS found in each chat: chat id -> message id
    found_messages: dict[str, int] = field(default_factory=dict)
    # names of models in the order of the last /models list
    listed_models: list[str] = field(default_factory=list)
    # the options of each chat in which the user changed some with /set or /best: chat id -> options
    changed_options: dict[str, ChatOptions] = field(default_factory=dict)
    sensors: Sensors = field(default_factory=Sensors)
    tools: ChatTools = field(default_factory=ChatTools)
    # if this event is set, the work in progress ends: the start of a tool server by the step `tools`, or in
    # plain mode the read of a message's files
    cancel: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.tools.may_run = self.options.tools
        self.system = self.system or self.options.system
        self._first_options = self.options

    def change_options(self, options: ChatOptions) -> None:
        """Use these options in the open chat, until the program ends. Other chats keep their options."""
        self.options = self.changed_options[self.session] = options

    @property
    def users_system(self) -> str | None:
        """The system prompt of the user's settings, with which each new chat begins; None: no prompt."""
        return self._first_options.system or None

    def open_chat(self, session: str, system: str | None) -> None:
        """Switch to another chat, with the options that the user gave this chat, or else with those of the
        start. Forget the selected reply, the compared replies and the newest reply of the previous chat, and
        turn its tool servers off."""
        self.session, self.system = session, system
        self.options = self.changed_options.get(session, self._first_options)
        self.selected, self.comparison, self.response, self.left_out = None, ReplyComparison(), None, 0
        self.told_full = False
        self.tools.turn_all_off()

    def model_changed(self) -> None:
        """Forget the two compared replies and the newest reply, because the former model wrote them, and the
        newest rating or choice, because the former model learned from it."""
        self.comparison, self.response, self.lesson = ReplyComparison(), None, None

    @property
    def kv(self) -> KVStats | None:
        """The figures of the KV cache after the newest reply, or None if there is no reply."""
        return self.response.kv if self.response else None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step. Only the app uses the fields `notice`, `flash`, `seconds` and `learned`. Only
    plain mode uses `reply`, `earlier`, `then`, `model`, `retell` and `leaves`, and prints `words`. Both the
    app and plain mode use `opens` and `message`."""

    words: str = ""  # the answer for plain mode, in lines that can be read aloud
    notice: str = ""  # the answer for the app as a notice in the conversation
    flash: str = ""  # the answer for the app's status line, which shows the answer for `seconds` seconds
    seconds: float = 3.0
    opens: str = ""  # the id of the chat to switch to; "": no switch
    message: int | None = None  # id of the message to show, in the chat `opens` or in the open chat
    retell: bool = False  # True if plain mode prints the earlier messages of the chat `opens`
    learned: bool = False  # True if the step changed ratings or the adapter version
    reply: BeginReply | None = None  # a function that streams a reply; plain mode calls it after `words`
    earlier: str = ""  # the text of the reply that `reply` continues
    then: "Step | None" = None  # the next step, which runs after `reply`
    model: str = ""  # the name of the model to switch to; "": no switch
    leaves: bool = False  # True if the chat must end


Step = Callable[[Runtime, ChatState, str], Outcome]  # the str is the argument of the command


def text_outcome(text: str) -> Outcome:
    """Return an outcome that shows the same text in the app and in plain mode."""
    return Outcome(words=text, notice=text)


def system_prompt_of(turns: list[Turn]) -> str | None:
    return next((turn.content for turn in turns if turn.role == "system"), None)
