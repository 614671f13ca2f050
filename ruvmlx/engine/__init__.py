"""The engine: it turns a request into a stream of text.

It may import models, backends, `kv`, `grammar` and sampling, but nothing of ratings (`sona`) or of the store:
a recorder passes the hidden states on. Start with `run.py` (one request: prefill, then decode), then
`scheduler.py` (many requests in one batch).
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
