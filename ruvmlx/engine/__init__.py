"""This package is the engine: it turns a request into a stream of text.

The engine uses the packages `models`, `backends`, `kv`, `lora` and `kernels`. The engine imports neither
`sona` (ratings) nor the store: a recorder (recorder.py) passes the hidden state of each token to the learning
loop. Start with `run.py` (one request: prefill, then decode), then read `scheduler.py` (many requests in one
batch).
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
