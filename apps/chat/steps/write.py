"""Commands for replies: write again, continue, edit the question, switch between alternatives, copy."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ruvmlx.chats.chat_file import write_new
from ruvmlx.engine.types import Chunk
from ruvmlx.errors import NotFound, UsageError
from ruvmlx.host.serving import BeginReply
from ruvmlx.models.text.thinking import split
from ruvmlx.runtime import Runtime, Turn
from ruvmlx.settings import parse
from ruvmlx.text import excerpt, sanitize

from .. import clipboard, describe, mentions
from ..arguments import parse_number
from ..code import code_blocks
from ..state import ChatState, Outcome, told
from ..tools.described import result_lines
from .shown import shown_question, shown_reply

MOST_FOUND = 20  # messages that /find lists
NAMES = {"user": "You", "assistant": "Assistant", "tool": "Tool"}


def say(state: ChatState, text: str, instead_of: int | None = None, function: str = "") -> BeginReply:
    """Streams the reply to a message. instead_of: id of the earlier message that this one replaces. function:
    the tool that it must call."""
    session, options = state.session, state.options
    state.tools.begin_answer()
    how = with_tools(state, function) | ({} if instead_of is None else {"instead_of": instead_of})

    def begin(runtime: Runtime, cancel: threading.Event) -> Iterator[Chunk]:
        return runtime.chats.say(session, text, **options.for_answer(cancel), **how)

    return begin


def write_again(state: ChatState, message: int | None = None) -> BeginReply:
    """Streams another reply beside the one with this message id, or beside the last."""
    session, options = state.session, state.options
    state.tools.begin_answer()
    how = with_tools(state)
    return lambda runtime, cancel: runtime.chats.again(
        session, **options.for_answer(cancel), message=message, **how
    )


def with_tools(state: ChatState, function: str = "") -> dict[str, Any]:
    """What a method of `Conversations` takes besides, if tools are on."""
    return {"tools": state.tools.offer(function)} if state.tools.is_on or function else {}


def write_more(state: ChatState, message: int | None = None) -> BeginReply:
    """Streams the rest of the reply with this message id, or of the last one."""
    session, options = state.session, state.options
    return lambda runtime, cancel: runtime.chats.continue_reply(
        session, **options.for_reply(cancel), message=message
    )


def again(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    return Outcome(reply=write_again(state), then=place)


def best(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Without an argument, say how many replies are written to a question."""
    if argument:
        state.options = replace(state.options, best_of=parse("best_of", argument, "/best"))
    count = state.options.best_of or runtime.settings.best_of
    return told(describe.best_of(count, runtime.learning.judge(runtime.learner) is not None))


def more(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    """Write only the rest: the reader has seen what came before."""
    return Outcome(reply=write_more(state))


def edit(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Without an argument, show the question."""
    question = shown_question(runtime, state)
    if not argument:
        return Outcome(
            f"Your question: {mentions.as_shown(question.content)}\nTo change it: /edit and the new text."
        )
    return Outcome(reply=say(state, argument, question.id))


def rewrite(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Without an argument, show the reply."""
    reply = shown_reply(runtime, state, "rewrite")
    assert reply.id is not None
    if not argument:
        shown = sanitize(split(reply.content).answer)
        return Outcome(f"The reply: {shown}\nTo change it: /rewrite and your text.")
    edited = runtime.chats.edit_reply(state.session, reply.id, argument)
    if edited.preference is None:
        return Outcome(edited.failure or f"{describe.NOTHING_LEARNED}.")
    state.lesson = edited.preference
    return Outcome(describe.preference_words(state.lesson, describe.YOUR_VERSION))


def next_reply(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    return _flip(runtime, state, 1)


def previous_reply(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    return _flip(runtime, state, -1)


def _flip(runtime: Runtime, state: ChatState, step: int) -> Outcome:
    runtime.chats.next_sibling(state.session, step)
    where = place(runtime, state, "").words
    return Outcome("\n".join(filter(None, [*spoken(runtime.chats.turns(state.session)[-2:]), where])))


def place(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    """Say which of several replies in this place is shown."""
    last = runtime.chats.turns(state.session)[-1]
    if last.branches == 1:
        return Outcome()
    return Outcome(f"({last.branch} of {last.branches} replies in this place; /next, /prev)")


def spoken(turns: list[Turn]) -> list[str]:
    """The messages, with the speakers' names."""
    return [line for turn in turns if is_shown(turn) for line in _lines(turn)]


def is_shown(turn: Turn) -> bool:
    """Return whether the chat shows this message. A reply that only calls tools is not shown; the tools'
    results are."""
    return turn.role != "system" and (not turn.calls or turn.role == "tool" or bool(turn.content))


def _lines(turn: Turn) -> list[str]:
    if turn.role == "tool":
        return result_lines(turn)
    return [f"{NAMES[turn.role]}: {mentions.as_shown(split(turn.content).answer)}"]


def copy(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Copy the shown reply, or one of its code blocks."""
    reply = sanitize(split(shown_reply(runtime, state, "copy").content).answer)
    blocks = code_blocks(reply)
    number = parse_number(argument, len(blocks), "code blocks")
    clipboard.copy(reply if number is None else blocks[number - 1])
    return Outcome("Copied." if number is None else f"Copied code block {number} of {len(blocks)}.")


def save(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Write a code block of the shown reply to a new file: "2 sort.py"; the first one without a number."""
    reply = sanitize(split(shown_reply(runtime, state, "save from").content).answer)
    number, _, name = argument.partition(" ") if argument[:1].isdigit() else ("1", "", argument)
    blocks = code_blocks(reply)
    at = parse_number(number, len(blocks), "code blocks")
    if at is None or not name.strip():
        raise UsageError("which file? Give the block's number and a name, as in /save 1 sort.py")
    path = state.options.files.path(name.strip())
    write_new(path, blocks[at - 1].rstrip("\n") + "\n")
    return told(f"Written: {path.absolute()} (code block {at} of {len(blocks)})")


def find(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """The messages of the open chat that contain all these words, each with the place where they are."""
    words = argument.lower().split()
    if not words:
        raise UsageError("which words? /find lists the messages of this chat that contain them")
    found = [
        (number, turn)
        for number, turn in enumerate(runtime.chats.turns(state.session), 1)
        if turn.role in NAMES and all(word in turn.content.lower() for word in words)
    ]
    if not found:
        return told("No message of this chat has these words; /chats WORDS searches all chats.")
    lines = [f"{n}. {NAMES[turn.role]}: {excerpt(turn.content, words)}" for n, turn in found[-MOST_FOUND:]]
    if len(found) > MOST_FOUND:
        lines.insert(0, f"{len(found):,} messages have these words; these are the newest.")
    return told("\n".join([*lines, "/goto and the number shows a message."]))


def goto(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Show the message with this number: in plain mode with the one after it."""
    turns = runtime.chats.turns(state.session)
    if not turns:
        raise NotFound("this chat has no messages yet")
    number = parse_number(argument, len(turns), "messages")
    if number is None:
        raise UsageError("which message? Give its number in /find, as in /goto 12")
    return Outcome("\n".join(spoken(turns[number - 1 : number + 1])), message=turns[number - 1].id)
