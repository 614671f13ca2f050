"""This module answers GET /v1/models in OpenAI's form. If the request has the header `anthropic-version`, the
answer has Anthropic's form."""

from collections.abc import Container
from datetime import UTC, datetime
from typing import Literal

from msgspec import Struct

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
    """All names that a request can give as `model`, on one page."""

    data: list[AnthropicModel]
    first_id: str
    last_id: str
    has_more: bool = False


async def list_models(call: Call) -> Answer:
    """Return all names that a request can give as its field `model`."""
    names = await call.models.names(call.salt)
    if call.is_anthropic:
        cards = [await _anthropic_card(call, name) for name in names]
        return AnthropicModelList(cards, names[0], names[-1])
    known = await embedders(call.models)
    return ModelList("list", [_card(call, name, known) for name in names])


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
        anthropic_answer=AnthropicModelList,
    ),
    Endpoint(
        "GET", "/v1/models/{id:path}", show_model, "Show one of them.", ModelCard, statuses=(404,),
        anthropic_answer=AnthropicModel,
    ),
]  # fmt: skip
