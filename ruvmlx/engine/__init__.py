"""Turns requests into streams of text."""

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
