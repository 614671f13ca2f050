"""This module answers the requests of ollama's clients about models: /api/tags, show, ps, version
and embed."""

import asyncio
import contextlib
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from ruvmlx.models.config.model import Model
from ruvmlx.models.load import load_model
from ruvmlx.models.text.thinking import tag_of

from .bodies import EmbeddingBody
from .embeddings import embed_texts
from .endpoint import Answer, Call, Endpoint
from .errors import ApiError
from .gaps import gap_tokens
from .memory_looks import look_at_model
from .memory_share import PooledModel
from .ollama_bodies import OllamaEmbedBody, OllamaEmbeddingsBody, OllamaShowBody, is_last_use
from .ollama_chat import CLIENTS
from .serving import ModelFacts


class OllamaDetails(Struct):
    """The file format, the family, the size and the quantisation of a model. A field is empty if the server
    does not know its value."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Struct):
    """A name that a request can give as its field `model`. digest: the model's fingerprint; empty until the
    server has opened the model once. size: the number of bytes of the weights in the file. In /api/ps, size
    is the number of bytes in memory of the weights, the working memory and the KV caches."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(Struct):
    """The names of all models."""

    models: list[OllamaModel]


class OllamaRunning(OllamaModel):
    """An open model. expires_at: the time at which the server closes the model if no request uses it; a time
    in the far future means that the server keeps the model open. size_vram: always 0, because the server does
    not measure separate GPU memory."""

    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModels(Struct):
    """All open models."""

    models: list[OllamaRunning]


class OllamaFacts(Struct):
    """The facts about a model. model_info: the model's shape, for example its number of layers. capabilities:
    the kinds of requests that the model can answer."""

    template: str
    modified_at: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modelfile: str = ""
    parameters: str = ""
    license: str = ""


class OllamaVector(Struct):
    """The vector (embedding) of a text."""

    embedding: list[float]


class OllamaVersion(Struct):
    """The version of ollama whose requests this server answers. Clients compare this version with the oldest
    version that they accept."""

    version: str


class OllamaVectors(Struct):
    """The vectors (embeddings) of several texts, one for each text. The durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int
    total_duration: int
    load_duration: int


_NEVER = "9999-12-31T23:59:59Z"
OLLAMA_VERSION = "0.14.2"


async def tags(call: Call) -> Answer:
    """Return the names of all models, and of the adapters of the open models."""
    found = [(name, await call.models.find(name)) for name in await call.models.names(call.salt)]
    return OllamaModels([_model(call, name, m.serving.about, m.serving.about.bytes) for name, m in found])


async def open_tags(call: Call) -> Answer:
    """Return the open models and their memory."""
    found = [await _running(call, model) for model in call.models.open_models]
    return OllamaRunningModels([model for model in found if model is not None])


async def _running(call: Call, model: PooledModel) -> OllamaRunning | None:
    """Return the row of an open model for /api/ps. Return None if the server has closed the model in the
    meantime."""
    look = await look_at_model(call.models, model)
    if look is None:
        return None
    held = look.held
    about = model.serving.about
    known = _model(call, about.name, about, held.model + held.kv)
    facts = {name: getattr(known, name) for name in known.__struct_fields__}
    ends = call.models.ends_at(model)
    expires = _NEVER if ends is None else _time(ends)
    return OllamaRunning(**facts, expires_at=expires, size_vram=0, context_length=about.context)


async def show(call: Call) -> Answer:
    """Return the facts about one model."""
    body: OllamaShowBody = call.body
    name = body.model or body.name
    if name is None:
        raise ApiError(400, "model: this field is required.", "model", "missing_required_parameter")
    found = await call.models.find(name)
    await call.models.check_adapter(found, name, call.salt)
    model = await call.models.look(found, lambda runtime: runtime.model)
    if model is None:
        model = await asyncio.to_thread(load_model, found.serving.host.holder.model)
    family, shape = model.shape.model_type, model.shape
    info = {
        "general.architecture": family,
        "general.basename": found.serving.about.name,
        f"{family}.context_length": model.context,
        f"{family}.embedding_length": shape.hidden_size,
        f"{family}.block_count": shape.n_layers,
        f"{family}.vocab_size": shape.vocab_size,
    }
    template = model.tokenizer.chat_template or ""
    about = ModelFacts.of(model, model.context)
    return OllamaFacts(template, _modification_time(call, about), _details(about), info, _capabilities(model))


def _capabilities(model: Model) -> list[str]:
    """Return ollama's words for the kinds of requests that the model can answer."""
    if model.embeds:
        return ["embedding"]
    tokenizer = model.tokenizer
    thinks, fills_gaps = tag_of(tokenizer.chat_template), gap_tokens(tokenizer)
    more = [word for word, is_able in (("insert", fills_gaps), ("thinking", thinks)) if is_able]
    return ["completion", "tools", *more, "embedding"]


async def version(call: Call) -> Answer:
    """Return the version of ollama whose requests this server answers."""
    return OllamaVersion(OLLAMA_VERSION)


async def embed(call: Call) -> Answer:
    """Turn texts into vectors (embeddings). The model computes the vectors without its adapter."""
    body: OllamaEmbedBody = call.body
    begun = time.monotonic_ns()
    if is_last_use(body.keep_alive):
        call.models.close_later(await call.models.find(body.model, embeds=True))
    asked = EmbeddingBody(body.model, body.input, dimensions=body.dimensions)
    found = await embed_texts(replace(call, body=asked), asked, is_cut=body.truncate is not False)
    vectors = [list(map(float, row.embedding)) for row in found.data]
    total = time.monotonic_ns() - call.arrived
    return OllamaVectors(found.model, vectors, found.usage.prompt_tokens, total, begun - call.arrived)


async def embed_one(call: Call) -> Answer:
    """Turn one text into a vector (embedding). Older clients use this endpoint."""
    body: OllamaEmbeddingsBody = call.body
    asked = OllamaEmbedBody(body.model, body.prompt, body.keep_alive, truncate=False)
    try:
        found: OllamaVectors = await embed(replace(call, body=asked))
    except ApiError as error:
        if error.param == "input":  # this endpoint's own field has another name
            raise ApiError(
                error.status, f"prompt{str(error)[len('input') :]}", "prompt", error.code
            ) from None
        raise
    return OllamaVector(found.embeddings[0])


def _model(call: Call, name: str, about: ModelFacts, size: int) -> OllamaModel:
    return OllamaModel(name, name, _modification_time(call, about), size, about.fingerprint, _details(about))


def _details(about: ModelFacts) -> OllamaDetails:
    size = _parameter_words(about.parameters) if about.parameters else ""
    return OllamaDetails("", about.format, about.family, [about.family], size, about.quantisation)


def _parameter_words(count: int) -> str:
    """Return a number of parameters in ollama's form: "134.52M" or "7.2B"."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def _modification_time(call: Call, about: ModelFacts) -> str:
    """Return the time of the last change of the model's file or folder. If this time is not known, return the
    start of the server."""
    with contextlib.suppress(OSError):
        if about.path is not None:
            return _time(about.path.stat().st_mtime)
    return _time(call.serving.started)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


ENDPOINTS = [
    Endpoint("GET", "/api/tags", tags, "List the models, in ollama's form.", OllamaModels, **CLIENTS),
    Endpoint("GET", "/api/ps", open_tags, "List open models.", OllamaRunningModels, is_look=True, **CLIENTS),
    Endpoint("GET", "/api/version", version, "Ollama's version.", OllamaVersion, is_look=True, **CLIENTS),
    Endpoint(
        "POST", "/api/show", show, "Show a model.", OllamaFacts, body=OllamaShowBody,
        opens=lambda body: False, **CLIENTS,
    ),
    Endpoint(
        "POST", "/api/embed", embed, "Turn texts into vectors, in ollama's form.", OllamaVectors,
        body=OllamaEmbedBody, embeds=True, **CLIENTS,
    ),
    Endpoint(
        "POST", "/api/embeddings", embed_one, "Turn a text into a vector (older clients).", OllamaVector,
        body=OllamaEmbeddingsBody, embeds=True, **CLIENTS,
    ),
]  # fmt: skip
