"""This module applies the router (router.py) to a request. The module builds the router's input and chooses
an arm: a way to generate the reply."""

from collections.abc import Callable

import numpy as np

from ...engine.context_window import question_of
from ...engine.types import GenerationRequest
from ...models.config.model import Message
from ...store import Store
from ..learner import Learner
from .router import Route, Router, turns_of


class Routing:
    """The routers of one runtime: one router for each adapter. Only the backend's thread can use this
    object."""

    def __init__(self, store: Store, fingerprint: str, examples: bool):
        self._store, self._fingerprint, self._examples = store, fingerprint, examples
        self._routers: dict[str, Router] = {}

    def of(self, learner: Learner) -> Router:
        name = learner.history.name
        if name not in self._routers:
            self._routers[name] = Router(self._store, learner.history, self._fingerprint, self._examples)
        return self._routers[name]

    def choose(self, learner: Learner, request: GenerationRequest) -> Route | None:
        """Choose an arm for a request. Return None if the question is empty, or if only one arm is
        available."""
        learner.sync()
        router, question = self.of(learner), question_of(request)
        arms = tuple(arm for arm in router.offered if learner.active.differs or arm.startswith("adapter"))
        if len(arms) < 2 or not question.strip():
            return None
        messages = request.messages if request.messages is not None else [Message("user", question)]
        turns = turns_of(messages, self._vectors(learner, question, request.session_id))
        return router.choose(turns, request.sampling.seed, arms)

    def _vectors(
        self, learner: Learner, question: str, session_id: str | None
    ) -> Callable[[str], np.ndarray | None]:
        """Return a function that returns a question's vector, or None if the question has no vector. The
        function embeds the newest question, and it takes earlier questions' hidden states from the store or a
        cache."""
        index = learner.rating_index
        known = dict(self._store.replies.questions(session_id)) if session_id is not None else {}

        def vector(text: str) -> np.ndarray | None:
            if text == question:
                state = index.state_of(text)
            else:
                state = np.frombuffer(known[text], "<f4") if text in known else index.known_state(text)
            if state is None or state.shape != index.whitening.mean.shape or not np.isfinite(state).all():
                return None
            return index.whitening(state)

        return vector
