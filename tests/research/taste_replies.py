"""SampledReplies of the frozen model, several to each question, for comparisons of taste models.

They are sampled once and kept in a file; a comparison then takes minutes and runs no model.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ruvmlx.apps.prove.trial import Bench, TrialSetup, request_for, seed_for

from ruvmlx.engine import GenerationRequest, GenerationResponse
from ruvmlx.runtime import Runtime
from ruvmlx.sona import embedding

REPLIES = 8  # to each question


@dataclass(frozen=True)
class SampledReplies:
    """R replies to Q questions. texts, finished [R]. question [R]: index into questions. tokens: ids of each
    reply. hidden [R, D]: mean of the states from which its tokens were drawn. asked [Q, D]: the questions'
    pooled states, whitened. trained [Q]: a question to rate on, else an unseen one."""

    questions: list[str]
    texts: list[str]
    finished: np.ndarray
    question: np.ndarray
    tokens: list[np.ndarray]
    hidden: np.ndarray
    asked: np.ndarray
    trained: np.ndarray

    def save(self, path: Path) -> None:
        lengths = np.array([len(ids) for ids in self.tokens])
        np.savez(
            path, questions=self.questions, texts=self.texts, finished=self.finished, question=self.question,
            tokens=np.concatenate(self.tokens), lengths=lengths, hidden=self.hidden, asked=self.asked,
            trained=self.trained,
        )  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> "SampledReplies":
        with np.load(path, allow_pickle=False) as f:
            ends = np.cumsum(f["lengths"])[:-1]
            return cls(
                f["questions"].tolist(), f["texts"].tolist(), f["finished"], f["question"],
                np.split(f["tokens"], ends), f["hidden"], f["asked"], f["trained"],
            )  # fmt: skip


def sample(bench: Bench, setting: TrialSetup, seed: int = 0) -> SampledReplies:
    """REPLIES replies of the frozen model to each question of the setting."""
    questions = [*setting.prompts, *setting.heldout]
    asked = [i for i in range(len(questions)) for _ in range(REPLIES)]
    with bench.runtime() as runtime:
        requests = [
            request_for(runtime, setting, questions[q], seed_for(seed, 4, i)) for i, q in enumerate(asked)
        ]
        found = {r.request_id: r for r in runtime.writer.answers(requests)}
        replies = [found[r.request_id] for r in requests]
        hidden = [_mean_state(runtime, request, found[request.request_id]) for request in requests]
        whitened = embedding.embed(runtime.store, runtime.model, runtime.backend, questions)
    return SampledReplies(
        questions,
        [r.text for r in replies],
        np.array([r.finish_reason == "stop" for r in replies]),
        np.array(asked),
        [np.array(r.token_ids, np.int32) for r in replies],
        np.stack(hidden),
        np.stack(whitened),
        np.arange(len(questions)) < len(setting.prompts),
    )


def _mean_state(runtime: Runtime, request: GenerationRequest, response: GenerationResponse) -> np.ndarray:
    """Mean [D] of the hidden states from which the reply's tokens were drawn, as a trace keeps them."""
    prompt, reply = runtime.engine.prompt_ids(request), list(response.token_ids)
    states = runtime.backend.hidden_states([*prompt, *reply][:-1])
    return states[len(prompt) - 1 :].mean(axis=0)
