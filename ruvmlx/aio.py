"""The public API for asyncio, under its public name."""

# The code is in the room of the API. This file stays because programs import `ruvmlx.aio`.
from .api.aio import AsyncChat, AsyncModel, AsyncReplyStream, aopen

__all__ = ["AsyncChat", "AsyncModel", "AsyncReplyStream", "aopen"]
