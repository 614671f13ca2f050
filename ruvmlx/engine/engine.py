"""This module holds LLMInferenceEngine, which turns a request into a stream of chunks.

The engine does not use ratings. An optional `recorder` receives every token with its hidden state and logits
before the response is complete. The learning loop uses a recorder to collect the trace of a reply, from which
ratings learn.
"""

from collections.abc import Iterator

from ..backends.base import Backend, HeadAdapter
from ..errors import BadPrompt, PromptTooLong, UsageError
from ..kv.disk import CacheFolder
from ..kv.policy import TierPolicy
from ..models.config.model import Model, writes_nothing
from .draft_length import draft_length
from .draft_model import DraftModel
from .recorder import Recorder
from .run import Run
from .session_disk import model_key
from .sessions import SessionManager
from .types import Chunk, GenerationRequest, GenerationResponse


class LLMInferenceEngine:
    """An engine runs requests on one backend. Call its methods only in the thread that created the engine.
    The methods run one request at a time; batch.py runs several requests at a time."""

    def __init__(
        self,
        model: Model,
        backend: Backend,
        policy: TierPolicy | None = None,
        folder: CacheFolder | None = None,
        speculate: str = "auto",
        draft_model: DraftModel | None = None,
    ):
        """policy: the precision of the KV cache by the age of its tokens; None: the backend's default cache,
        with at least 16 bits for each number

        folder: the folder that keeps the caches of sessions between processes; None: no cache is kept
        speculate: the number of drafted tokens (drafts.py): "auto", "off" or a number; the replies do not
            depend on this value
        draft_model: a small model that guesses the next tokens of the reply; None: no draft model guesses
        """
        self.model = model
        self.backend = backend
        self.draft_length, self.draft_model = draft_length(speculate), draft_model
        self.sessions = SessionManager(backend, policy, folder=folder, model=model_key(model))

    def prompt_ids(self, request: GenerationRequest) -> list[int]:
        """Return the token ids of the prompt. Raise BadPrompt if the prompt is empty, is too long for the
        context, or has a token id beyond the vocabulary. Raise UsageError if the model writes no text."""
        if not self.model.shape.writes:
            raise UsageError(writes_nothing(self.model.name))
        tokenizer, limit = self.model.tokenizer, self.model.context
        if request.input_ids is not None:  # the caller has encoded the prompt already
            ids = self._checked_ids(request.input_ids)
        elif request.messages is not None:
            # a reply to instructions alone is allowed, as OpenAI's server allows it
            said = [m for m in request.messages if m.role != "system"] or request.messages
            if not any(m.content.strip() for m in said):
                raise BadPrompt("the prompt is empty; give some text.")
            ids = tokenizer.encode_chat(
                request.messages,
                thinking=request.thinking,
                tools=request.tools,
                salt=request.cache_salt,
                most=limit,
                opening=request.opening,
                values=request.template_values,
            )
        else:
            if not (request.prompt or "").strip():
                raise BadPrompt("the prompt is empty; give some text.")
            ids = tokenizer.encode(request.prompt or "", most=limit)
        if len(ids) >= limit:
            raise PromptTooLong(len(ids), limit - 1, self.model.name)
        return ids

    def _checked_ids(self, input_ids) -> list[int]:
        ids, vocab = [int(i) for i in input_ids], self.model.shape.vocab_size
        if not ids:
            raise BadPrompt("the prompt is empty; give some token ids.")
        if min(ids) < 0 or max(ids) >= vocab:
            raise BadPrompt(f"token ids run from 0 to {vocab - 1}; got {min(ids)} to {max(ids)}.")
        return ids

    def run(
        self,
        request: GenerationRequest,
        adapter: HeadAdapter | None = None,
        recorder: Recorder | None = None,
    ) -> Run:
        """Start one request. The caller iterates over `chunks` of the returned run."""
        return Run(self, request, adapter, recorder)

    def stream(
        self,
        request: GenerationRequest,
        adapter: HeadAdapter | None = None,
        recorder: Recorder | None = None,
    ) -> Iterator[Chunk]:
        """Run a request: yield chunks with the progress of the prefill, then chunks with text. Only the last
        chunk has `response`."""
        yield from self.run(request, adapter, recorder).chunks()

    def generate(
        self,
        request: GenerationRequest,
        adapter: HeadAdapter | None = None,
        recorder: Recorder | None = None,
    ) -> GenerationResponse:
        """Return the complete response."""
        for chunk in self.stream(request, adapter, recorder):
            last = chunk
        assert last.response is not None
        return last.response
