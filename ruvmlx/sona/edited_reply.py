"""This module makes a new reply from a reply whose answer the user rewrote. The store keeps the original
reply, too."""

import uuid
from dataclasses import replace

from ..errors import UsageError
from ..models.config.model import Message, Tokenizer
from ..models.text import thinking
from ..store import ReplyRow
from ..text import sanitize
from .user_taste import reply_features

LONGER = 100  # letters by which a tail of the prompt can be longer than a reply before the search for it ends


def edited_reply(tokenizer: Tokenizer, original: ReplyRow, answer: str) -> ReplyRow:
    """Return a copy of the original reply with the answer that the user wrote. The copy keeps the thought
    (the reasoning text before the answer) of the original.

    Raises UsageError if the answer is empty or unchanged, or if the original has no answer.

    The copy's tokens are the thought's tokens, the encoded answer and an end-of-reply token. The model did
    not sample the answer, so the copy's logprob is None.
    """
    if not answer.strip():
        raise UsageError("the edited reply is empty; give some text.")
    original = _with_begun_part(tokenizer, original)
    parts = thinking.split(original.text)
    if parts.is_open:
        raise UsageError("that reply ended inside its thought, so it has no answer to rewrite.")
    before = parts.answer
    if _as_shown(answer) == _as_shown(before):
        raise UsageError("the edited reply is the same as before; nothing was saved.")
    head = original.text[: len(original.text) - len(before)]
    thought = _thought_tokens(tokenizer, original)
    said = tokenizer.encode(head[len(head.rstrip()) :] + answer, add_bos=False)
    return replace(
        original,
        id=uuid.uuid4().hex[:12],
        adapter_version=0,
        sampled_ids=[*thought, *said, *_end(tokenizer, original)],
        text=head + answer,
        finish_reason="stop",
        logprob=None,
        latency_ratio=1.0,
        thought=len(thought),
        features=reply_features(original.prompt, head + answer, "stop").data,
        beside=None,
        edited=original.id,
    )


def _with_begun_part(tokenizer: Tokenizer, reply: ReplyRow) -> ReplyRow:
    """Move the tokens of a continued reply's first part from the end of the prompt to the start of the
    sampled tokens, and return the result. If the reply was not continued, return the reply unchanged."""
    sampled, text = [id_ for id_ in reply.sampled_ids if id_ not in tokenizer.eos_ids], reply.text.strip()
    for count in range(len(reply.prompt_ids)):
        begin = len(reply.prompt_ids) - count
        whole = tokenizer.decode(reply.prompt_ids[begin:] + sampled).strip()
        if whole.startswith(text):
            return replace(
                reply,
                prompt_ids=reply.prompt_ids[:begin],
                sampled_ids=reply.prompt_ids[begin:] + reply.sampled_ids,
            )
        if len(whole) > len(text) + LONGER:
            break
    return reply


def _as_shown(text: str) -> str:
    """Return the text in the form in which the chat's input line shows the text. If the user changes nothing,
    the input line returns the reply in this form."""
    return "\n".join(sanitize(text).splitlines()).strip()


def _thought_tokens(tokenizer: Tokenizer, original: ReplyRow) -> list[int]:
    """Return the sampled tokens of the original's thought."""
    counter = thinking.ThoughtCounter(tokenizer, thinking.opened_by(tokenizer, original.prompt_ids))
    for token in original.sampled_ids:
        counter.add(token)
    return original.sampled_ids[: counter.tokens]


def _end(tokenizer: Tokenizer, original: ReplyRow) -> list[int]:
    """Return a list with the token that ends a reply: the token that ended the original, or else the end
    token of the chat template. Return an empty list if the model has no end token."""
    asked = [Message("user", "?"), Message("assistant", "!")]
    for tokens in (original.sampled_ids[-1:], tokenizer.encode_chat(asked, add_generation_prompt=False)):
        if ends := [token for token in tokens if token in tokenizer.eos_ids]:
            return ends[-1:]
    return []
