"""This module answers GET /v1/models in OpenAI's form. If the request has the header `anthropic-version`, the
answer has Anthropic's form."""

from collections.abc import Container, Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal

from msgspec import Meta, Struct

from .endpoint import Answer, Call, Endpoint
from .errors import ApiError
from .model_pool import embedders


class ModelCard(Struct):
    """A name that a request can give as its field `model`. embeds: true if the model is trained to make
    vectors of texts."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    embeds: bool


class ModelList(Struct):
    """All names that a request can give as `model`. NAME means the model with the adapter in use.
    NAME@ADAPTER means the model with this adapter. NAME@none means the model without an adapter."""

    object: Literal["list"]
    data: list[ModelCard]


class AnthropicModel(Struct, tag_field="type", tag="model"):
    """A name that a request can give as its field `model`. max_input_tokens: the context length in tokens,
    which the prompt and the reply share."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    lifecycle: Literal["active"] = "active"


class AnthropicModelList(Struct):
    """A page of the names that a request can give as `model`. first_id, last_id: the ids of the page's first
    and last model; null if the page is empty. has_more: true if the list goes on after the page, or, with
    `before_id`, begins before the page."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ModelQuery(Struct):
    """The query of a request for the models in Anthropic's form: which page of the list the answer has. In
    OpenAI's form, the list has one page."""

    limit: Annotated[int, Meta(ge=1, le=1000, description="Models of a page.")] = 20
    after_id: Annotated[str, Meta(description="The last model's id of the page before.")] = ""
    before_id: Annotated[str, Meta(description="The first model's id of the page after.")] = ""


async def list_models(call: Call) -> Answer:
    """Return all names that a request can give as its field `model`."""
    names = await call.models.names(call.salt)
    if call.is_anthropic:
        page, has_more = _page(names, call.query)
        cards = [await _anthropic_card(call, name) for name in page]
        ends = (page[0], page[-1]) if page else (None, None)
        return AnthropicModelList(cards, ends[0], ends[1], has_more)
    known = await embedders(call.models)
    return ModelList("list", [_card(call, name, known) for name in names])


def _page(names: Sequence[str], query: ModelQuery) -> tuple[Sequence[str], bool]:
    """Return a page of the names, and whether the list goes on beyond the page. Raise ApiError, 404, if the
    query has a name that is not in the list."""
    for field in ("after_id", "before_id"):
        if (id := getattr(query, field)) and id not in names:
            message = f"{field}: there is no such model; GET /v1/models lists them."
            raise ApiError(404, message, field, "model_not_found")
    if query.after_id:
        names = names[names.index(query.after_id) + 1 :]
    if query.before_id:
        names = names[: names.index(query.before_id)] if query.before_id in names else []
        return names[-query.limit :], len(names) > query.limit
    return names[: query.limit], len(names) > query.limit


async def show_model(call: Call) -> Answer:
    """Return the facts about the model name in the path. Raise ApiError, 404, if no request can give this
    name."""
    name = call.names["id"]
    if name not in await call.models.names(call.salt):
        raise ApiError(404, "there is no such model; GET /v1/models lists them.", "id", "model_not_found")
    if call.is_anthropic:
        return await _anthropic_card(call, name)
    return _card(call, name, await embedders(call.models))


def _card(call: Call, name: str, known: Container[str]) -> ModelCard:
    """Return the card of a model. known: the names of the models that are trained to embed texts."""
    embeds = name in known or name.rpartition("@")[0] in known
    return ModelCard(name, "model", call.serving.started, "ruvmlx", embeds)


async def _anthropic_card(call: Call, name: str) -> AnthropicModel:
    started = datetime.fromtimestamp(call.serving.started, UTC)
    context = (await call.models.find(name)).serving.about.context
    return AnthropicModel(name, name, f"{started:%Y-%m-%dT%H:%M:%SZ}", context, context)


ENDPOINTS = [
    Endpoint(
        "GET", "/v1/models", list_models, "List the models, and adapters.", ModelList,
        anthropic_answer=AnthropicModelList, query=ModelQuery, statuses=(404,),
    ),
    Endpoint(
        "GET", "/v1/models/{id:path}", show_model, "Show one of them.", ModelCard, statuses=(404,),
        anthropic_answer=AnthropicModel,
    ),
]  # fmt: skip
