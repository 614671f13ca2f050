"""This module samples replies in one batch. No user sees these replies; they only show what a model
writes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..backends.base import Backend, HeadAdapter, KVCache, Step
from ..backends.coarse import decode_coarse
from ..engine.session import common_prefix
from ..kernels.draw import TokenDrawing
from ..models.config.model import Message, Model, Tokenizer
from ..models.text import thinking
from ..pausing import Pause
from ..sampling import (
    LogitChanges,
    Sampling,
    choose_token,
    is_drawn_in_c,
    recommended_options,
    token_weights,
)

TEMPERATURE = 0.7

# A sampled reply is (token ids without the end token, True if the reply ended by itself).
SampledReply = tuple[list[int], bool]
# A function that gets each token before the token is added to its reply. The arguments are (index of the
# reply, token, ids [C] of the tokens that could be drawn, their probabilities [C], hidden state [D]).
NoteToken = Callable[[int, int, np.ndarray, np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class BegunReply:
    """The beginning of a reply: a prompt that the model has read. last: the model's output after the
    prompt."""

    cache: KVCache
    last: Step

    @classmethod
    def of(
        cls, backend: Backend, prompt: Sequence[int], pause: Pause, adapter: HeadAdapter | None = None
    ) -> "BegunReply":
        """Let the model read a prompt. pause: a function that can raise an exception to stop the reading; a
        long prompt takes seconds."""
        cache = backend.new_cache()
        return cls(cache, backend.prefill(list(prompt), cache, adapter, progress=lambda _: pause()))

    def fork(self) -> "BegunReply":
        """Return the beginning of another reply to the same prompt. The model need not read the prompt
        again."""
        return BegunReply(self.cache.fork(), self.last)


def begin_replies(
    backend: Backend, prompts: Sequence[list[int]], pause: Pause, adapter: HeadAdapter | None = None
) -> list[BegunReply]:
    """Let the model read prompts, and return the beginning of a reply to each prompt. The model reads the
    common beginning of the prompts only once. The arguments are those of `BegunReply.of`."""
    # The prefix that the first and the last prompt in sorted order share is a prefix of all prompts.
    shared = min(prompts)[: min(common_prefix(min(prompts), max(prompts)), min(map(len, prompts)) - 1)]
    if len(prompts) == 1 or not shared:
        return [BegunReply.of(backend, prompt, pause, adapter) for prompt in prompts]
    first, begun = BegunReply.of(backend, shared, pause, adapter), list[BegunReply]()
    for prompt in prompts:
        cache, rest = first.cache.fork(), prompt[len(shared) :]
        begun.append(BegunReply(cache, backend.prefill(rest, cache, adapter, progress=lambda _: pause())))
    return begun


def question_prompt(tokenizer: Tokenizer, question: str) -> list[int]:
    """Return the token ids of the prompt with a question of the program, to which the model writes sampled
    replies. A sampled reply has a low limit of tokens. So the prompt of a model that thinks contains an empty
    thought, and the reply begins with the answer."""
    asked = [Message("user", question)]
    prompt = tokenizer.encode_chat(asked, thinking=False)
    if tag := thinking.opened_by(tokenizer, prompt).strip():
        prompt = tokenizer.encode_chat(asked, opening=f"{tag}\n\n{thinking.TAGS[tag]}\n\n")
    return prompt


def sampling_of(model: Model) -> Sampling:
    """Return the sampling of replies that no user sees: the chat's sampling for this model, because the
    replies must be like the replies of the chat. But the temperature is TEMPERATURE, because replies to one
    question must differ."""
    return Sampling(**recommended_options(model.default_sampling) | {"temperature": TEMPERATURE})


def sampled_replies(
    backend: Backend, tokenizer: Tokenizer, begun: Sequence[BegunReply],
    generators: Sequence[np.random.Generator], longest: int, sampling: Sampling, pause: Pause,
    adapter: HeadAdapter | None = None, note: NoteToken | None = None,
) -> list[SampledReply]:  # fmt: skip
    """Sample one reply of at most `longest` tokens to each prompt in `begun`, and return the replies.

    generators: for each reply, the generator that draws its tokens; replies can share a generator. On the
        native backend with quantised weights, the replies of one generator do not depend on the other
        replies.
    sampling: how tokens are drawn; its seed does not count
    pause: a function that is called before each step of the batch; it can raise an exception to stop
    note: a function that gets each token; None to pass the tokens to no function
    """
    last, ids = [one.last for one in begun], [list[int]() for _ in begun]
    changes = [LogitChanges(sampling) for _ in begun] if sampling.changes_logits else []
    s, in_c = sampling, note is None and is_drawn_in_c(sampling)
    draw = TokenDrawing(s.temperature, s.top_p, s.min_p, s.top_k) if in_c else None
    going, ended = list(range(len(begun))), [False] * len(begun)
    while going:
        pause()
        for i in list(going):
            logits = last[i].logits
            if changes:
                changes[i].restrict(logits := logits.copy())
            u = generators[i].random()
            if draw is not None:
                token = draw(logits, u)
            else:
                candidates, weights = token_weights(logits, sampling)
                token = choose_token(candidates, weights, u)
            if changes:
                changes[i].take(token)
            if note is not None:
                note(i, token, candidates, weights / weights.sum(), last[i].hidden)
            ended[i] = token in tokenizer.eos_ids
            if not ended[i]:
                ids[i].append(token)
            if ended[i] or len(ids[i]) >= longest:
                going.remove(i)
        if going:
            newest, caches = [ids[i][-1] for i in going], [begun[i].cache for i in going]
            for i, step in zip(going, decode_coarse(backend, newest, caches, adapter), strict=True):
                last[i] = step
    return list(zip(ids, ended, strict=True))
