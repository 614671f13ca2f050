"""What ollama's clients ask of the models: /api/tags, show, ps, version and embed."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from ruvmlx import __version__
from ruvmlx.models.model import Model
from ruvmlx.models.thinking import tag_of

from .bodies import EmbeddingBody
from .embeddings import Embeddings, embeddings
from .endpoint import Answer, Call, Endpoint
from .ollama_bodies import OllamaEmbedBody, OllamaShowBody, plain_name
from .ollama_chat import CLIENTS


class OllamaDetails(Struct):
    """What a model is. What is not known is empty."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Struct):
    """A name that a request's `model` may have. digest: the model's fingerprint. size: bytes in memory."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(Struct):
    """All names."""

    models: list[OllamaModel]


class OllamaRunning(OllamaModel):
    """The loaded model. expires_at: far away: it stays. size_vram: 0: nothing is in a memory of its own."""

    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModels(Struct):
    """All loaded models."""

    models: list[OllamaRunning]


class OllamaFacts(Struct):
    """A model. model_info: its shape. capabilities: what requests may ask of it."""

    template: str
    modified_at: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modelfile: str = ""
    parameters: str = ""
    license: str = ""


class OllamaVersion(Struct):
    """The version of this server."""

    version: str


class OllamaVectors(Struct):
    """One vector for each text."""

    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int
    total_duration: int = 0
    load_duration: int = 0


_NEVER = "9999-12-31T23:59:59Z"


async def tags(call: Call) -> Answer:
    """List the model and its adapters."""
    size = await call.serving.host.call_between(lambda runtime: runtime.held().model)
    return OllamaModels([_model(call, name, size) for name in await call.serving.names(call.salt)])


async def ps(call: Call) -> Answer:
    """List the loaded model."""
    held = await call.serving.host.call_between(lambda runtime: runtime.held())
    known = _model(call, call.serving.model_name, held.model + held.kv)
    facts = {name: getattr(known, name) for name in known.__struct_fields__}
    context = call.serving.runtime.model.context
    return OllamaRunningModels(
        [OllamaRunning(**facts, expires_at=_NEVER, size_vram=0, context_length=context)]
    )


async def show(call: Call) -> Answer:
    """Show a model."""
    body: OllamaShowBody = call.body
    await call.serving.adapter_of(plain_name(body.model), None, call.salt)
    model = call.serving.runtime.model
    family, shape = model.shape.model_type, model.shape
    info = {
        "general.architecture": family,
        f"{family}.context_length": model.context,
        f"{family}.embedding_length": shape.hidden_size,
        f"{family}.block_count": shape.n_layers,
        f"{family}.vocab_size": shape.vocab_size,
    }
    template = model.tokenizer.chat_template or ""
    able = ["completion", "tools", *(["thinking"] if tag_of(template) else []), "embedding"]
    return OllamaFacts(template, _since(call), _details(model), info, able)


async def version(call: Call) -> Answer:
    """The version."""
    return OllamaVersion(__version__)


async def embed(call: Call) -> Answer:
    """Turn texts into vectors, by the untouched model."""
    body: OllamaEmbedBody = call.body
    asked = EmbeddingBody(plain_name(body.model), body.input)
    found: Embeddings = await embeddings(replace(call, body=asked))
    vectors = [list(map(float, row.embedding)) for row in found.data]
    return OllamaVectors(body.model, vectors, found.usage.prompt_tokens)


def _model(call: Call, name: str, size: int) -> OllamaModel:
    model = call.serving.runtime.model
    return OllamaModel(name, name, _since(call), size, model.fingerprint, _details(model))


def _details(model: Model) -> OllamaDetails:
    family = model.shape.model_type
    return OllamaDetails("", "gguf" if model.name.lower().endswith("gguf") else "", family, [family], "", "")


def _since(call: Call) -> str:
    return datetime.fromtimestamp(call.serving.started, UTC).isoformat().replace("+00:00", "Z")


ENDPOINTS = [
    Endpoint("GET", "/api/tags", tags, "List the model, in ollama's form.", OllamaModels, **CLIENTS),
    Endpoint("GET", "/api/ps", ps, "List the loaded model.", OllamaRunningModels, **CLIENTS),
    Endpoint("GET", "/api/version", version, "The server's version.", OllamaVersion, **CLIENTS),
    Endpoint("POST", "/api/show", show, "Show a model.", OllamaFacts, body=OllamaShowBody, **CLIENTS),
    Endpoint(
        "POST", "/api/embed", embed, "Turn texts into vectors, in ollama's form.", OllamaVectors,
        body=OllamaEmbedBody, **CLIENTS,
    ),
]  # fmt: skip
