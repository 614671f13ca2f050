"""This module has the steps for ratings: rate a reply, undo a rating, roll back to an earlier adapter
version, and show the state of learning."""

from ruvmlx.errors import NotFound
from ruvmlx.runtime import Runtime
from ruvmlx.text import EXCERPT

from ...progress import watching
from .. import describe, glossary
from ..arguments import parse_rating, parse_reason, parse_version
from ..overview import Overview, spoken_lines
from ..state import ChatState, Outcome, text_outcome
from ..view_model import RatingPlace, learn_status
from .shown import shown_reply


def rate(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Rate the last reply of the open chat."""
    rating, note = parse_rating(argument)
    reply = _shown_id(runtime, state)
    with watching(still=True) as watch:
        state.lesson = runtime.rate(reply, rating, note, watch=watch)
    summary = describe.first_summary(runtime.learning.first_summary())
    return Outcome("\n".join(filter(None, (describe.effect_words(state.lesson), summary))))


def why(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Add a reason to the bad rating that the user gave the last reply."""
    reason = parse_reason(argument)
    state.lesson = runtime.choices.give_reason(_shown_id(runtime, state), reason)
    return Outcome(describe.effect_words(state.lesson))


def _shown_id(runtime: Runtime, state: ChatState) -> str:
    reply = shown_reply(runtime, state, "rate").reply_id
    if reply is None:
        raise NotFound("this reply was imported, so it cannot be rated; /again writes one that can")
    return reply


def undo(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    words, flash = undo_newest(runtime, state.session)
    state.lesson = None
    return Outcome(words, flash=flash, learned=True)


def undo_newest(runtime: Runtime, session: str) -> tuple[str, str]:
    """Take back the newest rating or preference, which can be in another chat. Return the words that say
    what was taken back, for plain mode and for the app's status line. session: the id of the open chat. Raise
    NotFound if there is no feedback."""
    newest = runtime.newest_feedback()
    place = RatingPlace.of(runtime, session, newest) if newest else RatingPlace("", "")
    status = runtime.undo()
    return describe.undone(status, place, EXCERPT), describe.undone(status, place)


def rollback(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    said = describe.rolled_back(runtime.rollback(parse_version(argument)))
    state.lesson = None
    return Outcome(said, flash=said, learned=True)


def details(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    """Show the figures of the newest reply, of the newest rating or choice, and of what was learned in all.
    After an undo, the rating or choice that was taken back has no figures."""
    lines = describe.reply_details(state.response, runtime.model.context) if state.response else []
    known = learn_status(runtime)
    if known is not None:
        # another process can have taken the lesson back
        if state.lesson and state.lesson.adapter_version <= known.adapter_version:
            lines.append(describe.lesson_details(state.lesson))
        if lines or known.adapter_version:
            lines.append(describe.adapter_details(known))
    return text_outcome("\n".join(lines or ["No figures yet: they come with a reply and with a rating."]))


def explain(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Explain a word of the program. Without a word, list the words that have an explanation."""
    return text_outcome(glossary.explain(argument))


def learning(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    view = Overview.of(runtime).later(state.sensors.read())
    return Outcome("\n".join(spoken_lines(view, state.kv)))
