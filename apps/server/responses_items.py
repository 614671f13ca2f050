"""This module builds the items of a response while the model writes them, and makes the events for these
items.

Each event is a function that takes the number of the event in the stream.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec import UNSET, Struct

from . import responses_answers as answers

NumberedEvent = Callable[[int], Struct]


@dataclass
class OpenText:
    """An item that the model writes now, with the text of the thought or of the answer."""

    is_thought: bool
    reply_id: str
    index: int
    text: str = ""

    @property
    def place(self) -> tuple[str, int, int]:
        return f"{'rs' if self.is_thought else 'msg'}_{self.reply_id}_{self.index}", self.index, 0

    def part(self) -> answers.ThoughtText | answers.AnswerText:
        return answers.ThoughtText(self.text) if self.is_thought else answers.AnswerText(self.text)

    def item(self, status: answers.Status) -> answers.OutputItem:
        id, content = self.place[0], [] if status == "in_progress" else [self.part()]
        if self.is_thought:
            return answers.ThoughtItem(id, status, [], content)  # type: ignore[arg-type]
        return answers.AnswerItem(id, status, "assistant", content)  # type: ignore[arg-type]

    def begin(self) -> Iterator[NumberedEvent]:
        yield lambda number: answers.ItemAdded(number, self.index, self.item("in_progress"))
        yield lambda number: answers.PartAdded(number, *self.place, self.part())

    def more(self, text: str) -> NumberedEvent:
        self.text += text
        kind = answers.ReasoningDelta if self.is_thought else answers.AnswerDelta
        return lambda number: kind(number, *self.place, text)

    def done(self, status: answers.Status) -> Iterator[NumberedEvent]:
        kind = answers.ReasoningDone if self.is_thought else answers.AnswerDone
        yield lambda number: kind(number, *self.place, self.text)
        yield lambda number: answers.PartDone(number, *self.place, self.part())
        yield lambda number: answers.ItemDone(number, self.index, self.item(status))


@dataclass
class OpenCall:
    """An item that the model writes now, with a tool call. group: the namespace of the function, or "". text:
    the arguments so far, as JSON text."""

    reply_id: str
    call_id: str
    group: str
    name: str
    index: int
    text: str = ""

    @property
    def place(self) -> tuple[str, int]:
        return f"fc_{self.reply_id}_{self.index}", self.index

    def item(self, status: answers.Status) -> answers.OutputItem:
        id, group = self.place[0], self.group or UNSET
        return answers.CallItem(id, status, self.call_id, self.name, self.text, group)

    def begin(self) -> Iterator[NumberedEvent]:
        yield lambda number: answers.ItemAdded(number, self.index, self.item("in_progress"))

    def more(self, text: str) -> NumberedEvent:
        self.text += text
        return lambda number: answers.ArgumentsDelta(number, *self.place, text)

    def done(self, status: answers.Status) -> Iterator[NumberedEvent]:
        yield lambda number: answers.ArgumentsDone(number, *self.place, self.name, self.text)
        yield lambda number: answers.ItemDone(number, self.index, self.item(status))
