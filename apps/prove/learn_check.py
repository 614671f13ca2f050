"""This module implements the command `learn check`. The model answers the same questions with the adapter,
which holds what the model has learned from ratings, and without the adapter.

Both replies to a question are sampled with the same random seed, so they are equal if the adapter changes
nothing. The summary calls a difference clear only if chance alone would cause a difference of this size for
at most one of twenty users.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ruvmlx.backends.base import original_model
from ruvmlx.engine import GenerationRequest, GenerationResponse
from ruvmlx.engine.batch import generate_many
from ruvmlx.errors import NotFound
from ruvmlx.models.config.model import Message
from ruvmlx.models.text.thinking import split
from ruvmlx.progress import Progress, Watch
from ruvmlx.runtime import Runtime
from ruvmlx.sona.judge import CandidateReply, TasteJudge
from ruvmlx.text import count, one_line

from . import prompts

EACH = 10  # the maximum number of fixed questions, and the maximum number of the user's own questions
# the maximum length of a user's question; a longer message probably contains a text and not only a question
MAX_OWN_CHARACTERS = 600
LEVEL = 0.95  # the confidence level of a clear difference
_DEALS = 10_000  # the number of random choices of signs in the test of the lengths


@dataclass(frozen=True)
class CheckRow:
    """A question with both replies: `before` without the adapter, `after` with the adapter.

    is_own: True for a question of the user (from a chat, a rated reply or the command line), False for a
        fixed question
    words_before, words_after: the numbers of words of the replies
    stars_before, stars_after: the stars that the taste model predicts for the replies
    predicted: the reply with more predicted stars: "before", "after" or "same"; "" if the ratings do not show
        clearly what the user likes
    """

    question: str
    is_own: bool
    before: str
    after: str
    words_before: int
    words_after: int
    stars_before: float
    stars_after: float
    predicted: str


@dataclass(frozen=True)
class CheckSummary:
    """The summary of all questions. "before" means without the adapter, and "after" means with the adapter.

    ratings: the number of ratings and preferences from which the taste model was fitted
    words_before, words_after: the mean numbers of words of the replies
    shorter, longer: the numbers of questions whose reply is shorter, or longer, with the adapter
    cut_before, cut_after: the numbers of replies that reached the length limit
    is_length_clear: True if the change of length is larger than chance explains, and if the mean number of
        words changes in the same direction
    preferred, not_preferred: the numbers of questions for which the taste model predicts more stars for the
        reply with the adapter, or for the reply without the adapter
    is_taste_clear: True if the ratings show clearly what the user likes
    is_preference_clear: True if the taste is clear, and if the difference between `preferred` and
        `not_preferred` is larger than chance explains
    """

    ratings: int
    questions: int
    words_before: float
    words_after: float
    shorter: int
    longer: int
    cut_before: int
    cut_after: int
    is_length_clear: bool
    preferred: int
    not_preferred: int
    is_taste_clear: bool
    is_preference_clear: bool


@dataclass(frozen=True)
class LearnCheck:
    rows: tuple[CheckRow, ...]
    summary: CheckSummary


def own_questions(runtime: Runtime) -> list[str]:
    """Return at most EACH of the user's own questions: the first messages of the user's chats, then the
    questions of rated replies, the newest rating first."""
    assert runtime.learner is not None
    rated = [question for question, *_ in reversed(runtime.learner.history.examples())]
    asked = [text for text in chain(runtime.store.messages.first_texts(), rated) if text.strip()]
    return [text for text in dict.fromkeys(asked) if len(text) <= MAX_OWN_CHARACTERS][:EACH]


def check(runtime: Runtime, questions: Sequence[str] | None, max_tokens: int, watch: Watch) -> LearnCheck:
    """Let the model answer questions with and without the adapter, and return the replies and a summary.
    Raises NotFound if the adapter has learned nothing.

    questions: the questions to ask; None for the fixed questions and the user's own questions
    watch: an object that gets the progress
    """
    learner = runtime.learning.require_learner()
    learner.sync()
    if not learner.version:
        raise NotFound(
            "nothing was learned yet, so there is nothing to check; rate some replies first, as in "
            "`ruvmlx rate last up`."
        )
    own = own_questions(runtime) if questions is None else list(questions)
    asked = [*(q for q in prompts.own("heldout") if q not in own)][:EACH] if questions is None else []
    asked += own
    replies = _replies(runtime, asked, max_tokens, watch)
    model = learner.taste.model
    is_clear = bool(learner.taste.status.preferences)
    stars = TasteJudge(model).score(
        [CandidateReply(q, r.text, r.finish_reason) for q, of in zip(asked, replies, strict=True) for r in of]
    )
    rows = tuple(
        _row(question, question in own, of, scores, is_clear)
        for question, of, scores in zip(asked, replies, stars.reshape(-1, 2), strict=True)
    )
    cut = [sum(of[side].finish_reason == "length" for of in replies) for side in (0, 1)]
    return LearnCheck(rows, _summary(rows, (cut[0], cut[1]), model.ratings, is_clear))


def _replies(
    runtime: Runtime, asked: Sequence[str], max_tokens: int, watch: Watch
) -> list[tuple[GenerationResponse, GenerationResponse]]:
    """Let the model write two replies to each question. Return (reply without the adapter, reply with the
    adapter) for each question."""
    found: dict[str, GenerationResponse] = {}
    before, after = (
        [_request(runtime, question, seed, max_tokens) for seed, question in enumerate(asked)]
        for _ in range(2)
    )
    for response in chain(_write_untouched(runtime, before), runtime.writer.answers(after)):
        found[response.request_id] = response
        watch.progress(Progress("Writing replies", len(found), 2 * len(asked), unit="replies"))
    pairs = zip(before, after, strict=True)
    return [(found[without.request_id], found[with_it.request_id]) for without, with_it in pairs]


def _write_untouched(runtime: Runtime, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResponse]:
    with original_model(runtime.backend):
        yield from generate_many(runtime.engine, requests)


def _request(runtime: Runtime, question: str, seed: int, max_tokens: int) -> GenerationRequest:
    system = runtime.settings.system
    messages = [*([Message("system", system)] if system else []), Message("user", question)]
    return GenerationRequest(
        messages=messages, max_new_tokens=max_tokens, sampling=runtime.writer.sampling(seed=seed)
    )


def _row(
    question: str, is_own: bool, replies: Sequence[GenerationResponse], stars: np.ndarray, is_clear: bool
) -> CheckRow:
    before, after = (split(reply.text).answer.strip() for reply in replies)
    lead = float(stars[1] - stars[0])
    better = "same" if lead == 0 else "after" if lead > 0 else "before"
    words = len(before.split()), len(after.split())
    return CheckRow(
        question, is_own, before, after, *words, float(stars[0]), float(stars[1]), better if is_clear else ""
    )


def _summary(
    rows: Sequence[CheckRow], cut: tuple[int, int], ratings: int, is_taste_clear: bool
) -> CheckSummary:
    before, after = (
        np.array([getattr(row, name) for row in rows], float) for name in ("words_before", "words_after")
    )
    grown = np.log1p(after) - np.log1p(before)
    is_same_way = bool(grown.mean() * (after.mean() - before.mean()) > 0)  # one long reply can be most words
    preferred, not_preferred = (sum(r.predicted == side for r in rows) for side in ("after", "before"))
    return CheckSummary(
        ratings,
        len(rows),
        float(before.mean()),
        float(after.mean()),
        int((after < before).sum()),
        int((after > before).sum()),
        *cut,
        is_same_way and is_beyond_chance(grown),
        preferred,
        not_preferred,
        is_taste_clear,
        is_taste_clear and sign_test(preferred, not_preferred) <= 1 - LEVEL,
    )


def is_beyond_chance(differences: np.ndarray) -> bool:
    """Return True if the mean of n paired differences [n] is farther from 0 than chance explains. The test
    compares this mean with the means of the same differences with random signs."""
    if not differences.any():
        return False
    signs = np.random.default_rng(0).choice((-1.0, 1.0), (_DEALS, differences.size))
    as_large = np.abs(signs @ differences) >= abs(differences.sum()) - 1e-9
    return float((1 + as_large.sum()) / (1 + _DEALS)) <= 1 - LEVEL


def sign_test(one: int, other: int) -> float:
    """Return the p-value of a two-sided sign test: the probability that a fair coin gives a result at least
    as one-sided as `one` heads and `other` tails."""
    count = one + other
    tail = sum(math.comb(count, k) for k in range(min(one, other) + 1))
    return min(1.0, float(2 * tail) / 2.0**count)


def sentences(summary: CheckSummary) -> list[str]:
    """Return the result of the check in two or three lines of text."""
    before, after, of = summary.words_before, summary.words_after, summary.questions
    words = f"{before:.0f} → {after:.0f} words"
    if summary.is_length_clear:
        shorter = after < before
        changed = summary.shorter if shorter else summary.longer
        said = [
            f"{'Shorter' if shorter else 'Longer'}: {words} on average; "
            f"{changed} of {count(of, 'reply', 'replies')} {'is' if changed == 1 else 'are'}."
        ]
    elif not (summary.shorter or summary.longer):
        said = [f"Length: no reply has another number of words ({words})."]
    else:
        said = [
            f"Length: {words} on average ({summary.shorter} shorter, {summary.longer} longer). "
            f"With {count(of, 'question', 'questions')}, such a difference can be chance."
        ]
    if cut := summary.cut_before + summary.cut_after:
        said.append(
            f"{cut} of {2 * of} replies reached the length limit ({summary.cut_before} before, "
            f"{summary.cut_after} after learning); --max-tokens raises it."
        )
    return [*said, _preference(summary)]


def _preference(summary: CheckSummary) -> str:
    if not summary.is_taste_clear:
        return (
            "Your ratings do not show yet what you like, so this check cannot say which replies you would "
            "prefer. More ratings of more replies show it. `/compare` in the chat lets you judge."
        )
    of, won = summary.questions, max(summary.preferred, summary.not_preferred)
    if summary.is_preference_clear and summary.preferred > summary.not_preferred:
        return f"By your ratings you would prefer the reply with what was learned in {won} of {of}."
    if summary.is_preference_clear:
        return (
            f"By your ratings you would prefer the reply without what was learned in {won} of {of}: "
            "`ruvmlx learn undo` or `learn rollback` takes lessons back."
        )
    return (
        "By your ratings neither side is clearly better: you would prefer the reply with what was learned in "
        f"{summary.preferred}, the other in {summary.not_preferred} of {of}."
    )


def reply_lines(row: CheckRow) -> list[str]:
    """Return two lines of text: the reply without the adapter, and the reply with the adapter."""
    return [f"  without: {one_line(row.before)}", f"  with:    {one_line(row.after)}"]
