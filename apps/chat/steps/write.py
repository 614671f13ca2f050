"""This module has the steps for replies. The steps write a reply again, continue it, edit its question,
switch between its branches (alternatives), copy it, save its code, and find messages."""

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
from ..state import ChatState, Outcome, text_outcome
from ..tools.described import result_lines
from .shown import shown_question, shown_reply

MOST_FOUND = 20  # the maximum number of messages that /find lists
GONE = "another program has deleted this chat; /new begins another one."
IS_BACK = "Another program had deleted this chat; now it is back."
NAMES = {"user": "You", "assistant": "Assistant", "tool": "Tool"}
PLACES = dict.fromkeys(NAMES, "replies in this place") | {"user": "versions of the question"}


def say(state: ChatState, text: str, instead_of: int | None = None, function: str = "") -> BeginReply:
    """Return a function that streams the reply to the message `text`.

    instead_of: the id of an earlier message that the new message replaces, or None. function: the name of the
    tool that the model must call, or "".
    """
    session, options = state.session, state.options
    state.tools.begin_answer()
    how = with_tools(state, function) | ({} if instead_of is None else {"instead_of": instead_of})

    def begin(runtime: Runtime, cancel: threading.Event) -> Iterator[Chunk]:
        return runtime.chats.say(session, text, **options.for_answer(cancel), **how)

    return _in_chat(session, begin)


def _in_chat(session: str, begin: BeginReply) -> BeginReply:
    """Return a function that begins a reply, and tells the user if another program has deleted the chat.
    A reply in a soft-deleted chat brings the chat back."""

    def begin_there(runtime: Runtime, cancel: threading.Event) -> Iterator[Chunk]:
        try:
            runtime.chats.turns(session, 1)
        except NotFound:
            raise NotFound(GONE) from None
        told = IS_BACK if session in runtime.store.chats.deletion_times() else ""
        for chunk in begin(runtime, cancel):
            yield replace(chunk, note=f"{chunk.note} {told}".strip()) if told else chunk
            told = ""

    return begin_there


def write_again(state: ChatState, message: int | None = None) -> BeginReply:
    """Return a function that lets the model answer the question of an earlier reply again. The function
    streams the new reply. The store keeps both replies as branches (alternatives).

    message: the message id of the earlier reply; None: the last reply.
    """
    session, options = state.session, state.options
    state.tools.begin_answer()
    how = with_tools(state)
    return _in_chat(
        session,
        lambda runtime, cancel: runtime.chats.again(
            session, **options.for_answer(cancel), message=message, **how
        ),
    )


def with_tools(state: ChatState, function: str = "") -> dict[str, Any]:
    """Return the keyword argument `tools` for a method of `Conversations`. Return {} if no tool server is on
    and `function` is ""."""
    return {"tools": state.tools.offer(function)} if state.tools.is_on or function else {}


def write_more(state: ChatState, message: int | None = None) -> BeginReply:
    """Return a function that streams the rest of a cut reply. message: the message id of the reply; None: the
    last reply."""
    session, options = state.session, state.options
    return _in_chat(
        session,
        lambda runtime, cancel: runtime.chats.continue_reply(
            session, **options.for_reply(cancel), message=message
        ),
    )


def again(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    return Outcome(reply=write_again(state), then=place)


def best(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Set the number of replies that the model writes to a question of the open chat, and print this number.
    Without an
    argument, only print the number."""
    if argument:
        state.change_options(replace(state.options, best_of=parse("best_of", argument, "/best")))
    count = state.options.best_of or runtime.settings.best_of
    return text_outcome(describe.best_of(count, runtime.learning.judge(runtime.learner) is not None))


def more(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    """Let the model continue the last reply. Plain mode prints only the new text, because the user has seen
    the first part of the reply."""
    return Outcome(reply=write_more(state), earlier=shown_reply(runtime, state, "continue").content)


def edit(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Replace the last question by the argument, and let the model write the reply to it. Without an
    argument, print the question."""
    question = shown_question(runtime, state)
    if not argument:
        return Outcome(
            f"Your question: {mentions.as_shown(question.content)}\nTo change it: /edit and the new text."
        )
    return Outcome(reply=say(state, argument, question.id))


def rewrite(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Save the user's version of the last reply, so that the model learns from this version. Without an
    argument, print the reply."""
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
    return Outcome("\n".join(filter(None, [*message_lines(runtime.chats.turns(state.session)[-2:]), where])))


def place(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    """Say which of several replies to one question, and which of several versions of the question, the chat
    shows. If there is one reply to one version, say nothing."""
    *before, last = runtime.chats.turns(state.session)[-2:]
    question = [turn for turn in before if last.role != "user" and turn.role == "user"]
    places = [
        f"{turn.branch} of {turn.branches} {PLACES[turn.role]}"
        for turn in (last, *question)
        if turn.branches > 1
    ]
    return Outcome(f"({', '.join(places)}; /next, /prev)" if places else "")


def message_lines(turns: list[Turn]) -> list[str]:
    """Return the lines of messages for plain mode, each message with the name of its speaker."""
    return [line for turn in turns if is_shown(turn) for line in _lines(turn)]


def is_shown(turn: Turn) -> bool:
    """Return True if the chat shows this message. The chat shows the results of tools. The chat does not show
    system prompts and replies that only call tools."""
    return turn.role != "system" and (not turn.calls or turn.role == "tool" or bool(turn.content))


def _lines(turn: Turn) -> list[str]:
    if turn.role == "tool":
        return result_lines(turn)
    return [f"{NAMES[turn.role]}: {mentions.as_shown(split(turn.content).answer)}"]


def copy(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Copy the last reply. If `argument` is a number, copy the reply's code block with this number."""
    reply = sanitize(split(shown_reply(runtime, state, "copy").content).answer)
    blocks = code_blocks(reply)
    number = parse_number(argument, len(blocks), "code block")
    clipboard.copy(reply if number is None else blocks[number - 1])
    return Outcome("Copied." if number is None else f"Copied code block {number} of {len(blocks)}.")


def save(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Write a code block of the last reply to a new file. argument: "2 sort.py", the number of the block and
    the name of the file; without a number, the first block is written."""
    reply = sanitize(split(shown_reply(runtime, state, "save from").content).answer)
    first, _, rest = argument.partition(" ")
    # "2024.txt" is a name, and "2" is a number
    number, name = (first, rest) if first.isdigit() else ("1", argument)
    blocks = code_blocks(reply)
    at = parse_number(number, len(blocks), "code block")
    if at is None or not name.strip():
        raise UsageError("which file? Give the block's number and a name, as in /save 1 sort.py")
    path = state.options.files.of_command(name.strip())
    write_new(path, blocks[at - 1].rstrip("\n") + "\n")
    return text_outcome(f"Written: {path.absolute()} (code block {at} of {len(blocks)})")


def find(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """List the newest messages of the open chat that contain all words of `argument`, each message with a
    number and an excerpt. The list has at most MOST_FOUND messages."""
    words = argument.lower().split()
    if not words:
        raise UsageError("which words? /find lists the messages of this chat that contain them")
    found = [
        (number, turn)
        for number, turn in enumerate(runtime.chats.turns(state.session), 1)
        if turn.role in NAMES and all(word in turn.content.lower() for word in words)
    ]
    if not found:
        return text_outcome("No message of this chat has these words; /chats WORDS searches all chats.")
    lines = [f"{n}. {NAMES[turn.role]}: {excerpt(turn.content, words)}" for n, turn in found[-MOST_FOUND:]]
    if len(found) > MOST_FOUND:
        lines.insert(0, f"{len(found):,} messages have these words; these are the newest.")
    return text_outcome("\n".join([*lines, "/goto and the number shows a message."]))


def goto(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Show the message whose number /find printed. Plain mode also prints the message that follows this
    message."""
    turns = runtime.chats.turns(state.session)
    if not turns:
        raise NotFound("this chat has no messages yet")
    number = parse_number(argument, len(turns), "message")
    if number is None:
        raise UsageError("which message? Give its number in /find, as in /goto 12")
    return Outcome("\n".join(message_lines(turns[number - 1 : number + 1])), message=turns[number - 1].id)
