"""This package is the engine: it turns a request into a stream of text.

The engine imports models, backends, `kv`, `grammar` and sampling, but neither ratings (`sona`) nor the store,
because a recorder passes the hidden states on. Start with `run.py` (one request: prefill, then decode), then
read `scheduler.py` (many requests in one batch).
"""

from .engine import LLMInferenceEngine
from .types import Chunk, GenerationRequest, GenerationResponse, Sampling, TokenLogprob

__all__ = [
    "Chunk",
    "GenerationRequest",
    "GenerationResponse",
    "LLMInferenceEngine",
    "Sampling",
    "TokenLogprob",
]
