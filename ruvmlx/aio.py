"""Offer the public API for asyncio as the module `ruvmlx.aio`."""

# The code is in ruvmlx/api/aio.py. This file exists because programs import `ruvmlx.aio`.
from .api.aio import AsyncChat, AsyncModel, AsyncReplyStream, aopen

__all__ = ["AsyncChat", "AsyncModel", "AsyncReplyStream", "aopen"]
