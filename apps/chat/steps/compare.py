"""This module compares two replies in plain mode. The model writes both replies one after the other. After
both replies, /compare asks the user to choose a reply, and /effect prints the lengths of the replies."""

from ruvmlx.runtime import Runtime

from .. import compare, describe
from ..state import ChatState, Outcome

NO_CHOICE = " Without a choice, the chat and /rate go on with the reply before these two."


def compare_replies(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Begin a blind comparison: let the model write the first reply. The next step, `then` of the outcome,
    writes the second reply."""
    compare.check(runtime, state.session, argument)
    state.comparison = compare.ReplyComparison()
    before = compare.shown_reply_id(runtime, state.session, argument)
    return _write_side(state, argument, compare.order(), [], before)


def _write_side(
    state: ChatState, text: str, sides: list[bool], written: list[compare.Candidate], before: int | None
) -> Outcome:
    """Let the model write one of the two replies. sides: the replies that the model has not written yet; True
    means a reply with the adapter, and False means a reply without the adapter. written: the replies that the
    model has written. before: the message id of the reply that the chat shows again until the user chooses,
    or None."""
    learned, *rest = sides
    number = len(written) + 1

    def finish_side(runtime: Runtime, state: ChatState, _: str) -> Outcome:
        both = [*written, compare.candidate(runtime, state.session, learned)]
        if rest:
            return _write_side(state, text, rest, both, before)
        compare.show_again(runtime, state.session, before)
        if both[0].is_like(both[1]):
            return Outcome(compare.lengths(*(one.text for one in both)))
        state.comparison = compare.ReplyComparison.at_end(runtime, state.session, both)
        return Outcome(f"Which is better? /choose 1 or /choose 2.{NO_CHOICE if before else ''}")

    begin = compare.writing(state.session, text, number == 1, learned, state.options)
    return Outcome(f"Reply {number}.", reply=begin, then=finish_side)


def show_effect(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Let the model write one reply without the adapter and one with the adapter, and print which reply is
    which."""
    compare.check(runtime, state.session, argument)
    before = compare.shown_reply_id(runtime, state.session, argument)
    return _write_named(state, argument, compare.draw_seed(), [], before)


def _write_named(state: ChatState, text: str, seed: int, replies: list[str], before: int | None) -> Outcome:
    """Let the model write the next reply: the first reply without the adapter, or the second reply with the
    adapter.
    replies: the texts of the replies that the model has already written. before: the message id of the reply
    that the chat shows again at the end, or None."""
    learned = bool(replies)

    def go_on(runtime: Runtime, state: ChatState, _: str) -> Outcome:
        both = [*replies, runtime.chats.turns(state.session)[-1].content]
        if len(both) < 2:
            return _write_named(state, text, seed, both, before)
        compare.show_again(runtime, state.session, before)
        return Outcome(compare.lengths(*both))

    begin = compare.writing(state.session, text, not learned, learned, state.options, seed)
    return Outcome(f"{compare.SIDES[learned].capitalize()}:", reply=begin, then=go_on)


def choose(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    chosen, other = state.comparison.choice(argument, runtime, state.session)
    state.lesson = runtime.chats.prefer(state.session, chosen.message, other.message)
    return Outcome(describe.preference_words(state.lesson, compare.choice_text(chosen)))
