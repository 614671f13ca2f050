"""ruvmlx: a local chat runtime, on MLX or on the CPU, that learns from its user's ratings.

    import ruvmlx

    with ruvmlx.open() as model:
        chat = model.chat(system="Answer in one sentence.")
        reply = chat.say("Why is the sky blue?")
        print(reply.text)
        reply.rate("up")

The names in `__all__` are the public API; all other names are internal. Python imports the module of a public
name when a program first uses the name.
"""

# Python imports this file before the command line can handle Ctrl+C. During a long import, Ctrl+C would
# print a traceback. So this file imports no other module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .api import Chat, LocalModel, Reply, ReplyStream, embed, open
    from .api.aio import AsyncChat, AsyncModel, AsyncReplyStream, aopen
    from .api.listing import list_adapters, list_models
    from .api.micro_adapter import ChangedMatrix, MicroAdapter, MicroStatus
    from .api.types import AdapterInfo, ModelInfo, Preference, Rating
    from .engine.context_window import Turn
    from .errors import RuvmlxError
    from .sampling import ReplyOptions
    from .sona.adapter_history import LearnStatus
    from .sona.rating_batch import BatchResult

__version__ = "0.1.0"

__all__ = [
    "AdapterInfo",
    "AsyncChat",
    "AsyncModel",
    "AsyncReplyStream",
    "BatchResult",
    "ChangedMatrix",
    "Chat",
    "LearnStatus",
    "LocalModel",
    "MicroAdapter",
    "MicroStatus",
    "ModelInfo",
    "Preference",
    "Rating",
    "Reply",
    "ReplyOptions",
    "ReplyStream",
    "RuvmlxError",
    "Turn",
    "aopen",
    "embed",
    "list_adapters",
    "list_models",
    "open",
]

_MODULES = {
    "AdapterInfo": "api.types",
    "ModelInfo": "api.types",
    "Preference": "api.types",
    "Rating": "api.types",
    "ReplyOptions": "sampling",
    "AsyncChat": "api.aio",
    "AsyncModel": "api.aio",
    "BatchResult": "sona.rating_batch",
    "ChangedMatrix": "api.micro_adapter",
    "MicroAdapter": "api.micro_adapter",
    "MicroStatus": "api.micro_adapter",
    "AsyncReplyStream": "api.aio",
    "LearnStatus": "sona.adapter_history",
    "RuvmlxError": "errors",
    "Turn": "engine.context_window",
    "aopen": "api.aio",
    "list_adapters": "api.listing",
    "list_models": "api.listing",
}  # all other public names are in the module api


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES.get(name, 'api')}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
