"""This module answers POST and DELETE /v1/ratings. If a rating changes the weights of the adapter, it changes
them before the server answers. DELETE undoes a rating."""

from collections.abc import Generator

from msgspec import Struct

from ruvmlx.errors import NotFound
from ruvmlx.runtime import PreferenceResult, RatingResult, Runtime
from ruvmlx.sona.adapter_history import AdapterHistory, LearnStatus
from ruvmlx.store import ReplyRow

from .bodies import RatingBody
from .endpoint import Answer, Call, Endpoint
from .errors import ApiError
from .openai_answers import ReplyId


class RatingAnswer(Struct, tag_field="object", tag="rating"):
    """The effect of a rating. applied: true if the weights changed. logprob_before, logprob_after: the mean
    log-probability per token of the reply in nats, before and after the update. kl: the distance between the
    model with the adapter and the frozen model on reference text, in nats per token; ratings keep it at or
    below kl_cap. adapter_version: the adapter version that the rating made."""

    id: ReplyId
    rating: str
    applied: bool
    logprob_before: float
    logprob_after: float
    kl: float
    kl_cap: float
    adapter: str
    adapter_version: int
    seconds: float


class PreferenceAnswer(Struct, tag_field="object", tag="preference"):
    """The effect of a preferred text. preferred_id: the id of the preferred text, which the store keeps as a
    reply. margin_before, margin_after: the mean log-probability per token (nats) of the preferred text minus
    the mean log-probability per token of the reply. The fields besides preferred_id, margin_before and
    margin_after have the same meaning as in RatingAnswer."""

    id: ReplyId
    preferred_id: ReplyId
    applied: bool
    margin_before: float
    margin_after: float
    kl: float
    kl_cap: float
    adapter: str
    adapter_version: int
    seconds: float


class RatingDeleted(Struct, tag_field="object", tag="rating.deleted"):
    """The answer after a rating or a preference was undone. adapter_version: the version in use now; if the
    rating was the newest feedback, its weights are bit for bit the weights from before the rating."""

    id: ReplyId
    deleted: bool
    adapter: str
    adapter_version: int


async def rate(call: Call) -> Answer:
    """Rate a reply, or store a text that the user prefers to the reply."""
    body: RatingBody = call.body
    if (body.rating is None) == (body.preferred is None):
        raise ApiError(400, "rating: give either rating or preferred.", "rating", "invalid_combination")
    if body.preferred is not None and body.note is not None:
        raise ApiError(400, "note: goes with a rating, not with preferred.", "note", "invalid_combination")
    learn = _rate if body.rating is not None else _prefer
    async with call.models.using_writer(body.id) as serving:
        host = serving.host
        answer = await host.call_between(
            lambda runtime: (
                learn(runtime, body, call.salt) if _is_measured(runtime, body, call.salt) else None
            )
        )
        if answer is None:
            await host.call_in_slices(
                lambda runtime: _measure(runtime, body, call.salt), lambda: serving.stopping
            )
            answer = await host.call_between(lambda runtime: learn(runtime, body, call.salt))
    call.serving.metrics.add("ruvmlx_ratings_total", kind="rating" if body.rating else "preference")
    return answer


def _is_measured(runtime: Runtime, body: RatingBody, tenant: str) -> bool:
    return runtime.learning.is_measured_for(_teachable_reply(runtime, body.id, tenant).adapter)


def _measure(runtime: Runtime, body: RatingBody, tenant: str) -> Generator[None, None, None]:
    """Measure the model in slices, so that the replies of other clients go on."""
    return runtime.learning.measure_in_slices(_teachable_reply(runtime, body.id, tenant).adapter)


def _rate(runtime: Runtime, body: RatingBody, tenant: str) -> RatingAnswer | PreferenceAnswer:
    reply = _teachable_reply(runtime, body.id, tenant)
    done: RatingResult = runtime.rate(reply.id, str(body.rating), body.note or "", reply.adapter)
    return RatingAnswer(
        done.reply_id, done.rating, done.applied, done.logprob_before, done.logprob_after,
        done.kl, done.kl_cap, _learner(runtime, reply), done.adapter_version, done.total_us / 1e6,
    )  # fmt: skip


def _prefer(runtime: Runtime, body: RatingBody, tenant: str) -> RatingAnswer | PreferenceAnswer:
    reply = _teachable_reply(runtime, body.id, tenant)
    done: PreferenceResult = runtime.choices.rewrite(reply.id, body.preferred or "", reply.adapter)
    return PreferenceAnswer(
        done.worse, done.better, done.applied, done.margin_before, done.margin_after,
        done.kl, done.kl_cap, _learner(runtime, reply), done.adapter_version, done.total_us / 1e6,
    )  # fmt: skip


def _teachable_reply(runtime: Runtime, id: str, tenant: str) -> ReplyRow:
    """Return the reply with this id. Raise ApiError, 404, if the client has no reply with this id, and 409 if
    an adapter is in use but the model wrote the reply without one, because only the adapter that wrote a
    reply can learn from it."""
    reply = _reply(runtime, id, tenant)
    if reply.adapter is None and runtime.learner is not None:
        message = "id: the untouched model wrote this reply, so no adapter can learn from its rating."
        raise ApiError(409, message, "id", "no_adapter")
    return reply


def _learner(runtime: Runtime, reply: ReplyRow) -> str:
    """Return the name of the adapter that learns from a rating of this reply: the adapter that wrote the
    reply, or else the adapter in use."""
    return reply.adapter or runtime.learning.require_learner().history.name


async def take_back(call: Call) -> Answer:
    """Undo all ratings of a reply, as if the user had never rated the reply. If the reply has no rating but a
    preference, the preference can be undone only if no feedback came after it."""
    id = call.names["id"]
    async with call.models.using_writer(id) as serving:
        return await serving.host.call_between(lambda runtime: _take_back(runtime, id, call.salt))


def _take_back(runtime: Runtime, id: str, tenant: str) -> RatingDeleted:
    reply = _reply(runtime, id, tenant)
    name = _learner(runtime, reply)
    history = AdapterHistory(runtime.store, reply.fingerprint, name)
    rated = any(rating.reply_id == reply.id for rating in history.ratings())
    status = runtime.unrate(reply.id, name) if rated else _without_preference(history, reply)
    return RatingDeleted(reply.id, True, name, status.adapter_version)


def _without_preference(history: AdapterHistory, reply: ReplyRow) -> LearnStatus:
    newest = max((pair.version for pair in history.pairs.in_force()), default=0)
    own = [pair.version for pair in history.pairs.in_force() if reply.id in (pair.better, pair.worse)]
    if not own:
        raise NotFound("that reply has no rating in force.")
    if max(own) < max([newest, *(rating.version_after for rating in history.ratings())]):
        message = "only the newest preference can be taken back; other feedback came after this one."
        raise ApiError(409, message, "id", "not_the_newest")
    return history.undo()


def _reply(runtime: Runtime, id: str, tenant: str) -> ReplyRow:
    """Return the reply whose id is exactly `id`, so that a client cannot rate another reply by mistake. Raise
    ApiError, 404, if there is no reply with this id, or if it was written for another API key."""
    missing = ApiError(404, "id: there is no such reply; give the id of a completion.", "id", "not_found")
    try:
        reply = runtime.store.replies.get(id)
    except NotFound:
        raise missing from None
    if reply.id != id or reply.tenant != tenant:
        raise missing
    return reply


SHOWN_REPLIES, SHOWN_LETTERS = 50, 300


class ReplyCard(Struct):
    """A reply in the list of replies. question, text: the first characters of the prompt and of the reply.
    rating: null if the reply has no rating. created: the Unix time of the reply."""

    id: ReplyId
    question: str
    text: str
    created: float
    rating: str | None


class ReplyCards(Struct):
    """The newest replies that were written for this API key, the newest first."""

    replies: list[ReplyCard]


async def list_replies(call: Call) -> Answer:
    """Return the newest replies that were written for this API key."""

    def cards(runtime: Runtime) -> ReplyCards:
        rows = runtime.store.replies.newest(call.salt, SHOWN_REPLIES)
        return ReplyCards([
            ReplyCard(row.id, row.prompt[:SHOWN_LETTERS], row.text[:SHOWN_LETTERS], row.created, row.rating)
            for row in rows
        ])  # fmt: skip

    async with call.models.using_any() as serving:
        return await serving.host.call_between(cards)


ENDPOINTS = [
    Endpoint("GET", "/v1/replies", list_replies, "List the newest replies.", ReplyCards, is_private=True),
    Endpoint(
        "POST", "/v1/ratings", rate, "Rate a reply: the weights change at once.",
        RatingAnswer | PreferenceAnswer, body=RatingBody, statuses=(404, 409),
        links=[{"operationId": "take_back", "parameters": {"id": "$response.body#/id"}}],
    ),
    Endpoint(
        "DELETE", "/v1/ratings/{id}", take_back, "Take all ratings of a reply back.", RatingDeleted,
        statuses=(404, 409),
    ),
]  # fmt: skip
