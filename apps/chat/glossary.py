"""This module explains words of the program that many users do not know. Each explanation has one to three
sentences."""

import re

from ruvmlx.errors import NotFound
from ruvmlx.text import did_you_mean, one_line

TEXT = """\
adapter: What was learned from your ratings, kept under a name beside the model. The model's own
    weights stay as they are, so an adapter can be switched off, copied or deleted. F4 lists them.
allowed change: How far ratings may take the model from the original one. At 100%, a rating that
    would go further is scaled down. It says how much has changed, not how good that is: /compare
    shows both models' replies.
backend: The part that computes: native (our C code, on the CPU) or mlx (Apple's library, on the
    GPU).
branch: One of several replies, or questions, in the same place of a chat. Nothing is overwritten:
    the arrow keys switch between branches.
cache: What the model has read of this chat, kept in memory so that it need not be read again. The
    newest tokens are kept precisely (recent), those before with 8 bits (older), the others with 4
    (oldest).
context: How many tokens the model can read at once: your messages, its replies and the system
    prompt. In a longer chat, the oldest messages are left out.
KL: The distance between what two models say, in nats per token: 0 is the same model. ruvmlx keeps
    what was learned below a limit, and shows the share of it that is used (the allowed change).
log-probability: How likely the model finds a text, per token: -0.1 is very likely, -3 is not.
preference: Your choice between two replies to one question, or your own version of a reply. The
    model learns from it at once, as from a rating.
quality: An estimate of how the newest replies look: whether they end, repeat nothing, have the
    length that the question asks for, and fit your taste. It says nothing about truth.
rating: Your opinion of a reply: good, bad, or 1 to 5 stars. The model learns from it at once.
rest: The memory of the program that is not the model, the caches or what was learned: Python,
    libraries and the screen.
system prompt: A text that the model reads before the chat, for example "Answer briefly". /system
    sets it, /prompt shows all that the model reads.
temperature: How freely words are drawn: 0 always takes the likeliest one, 1 draws as the model
    would.
tier: A part of the cache with one precision, chosen by the age of its tokens: recent, older,
    oldest.
token: A piece of text that the model reads or writes at once: a word or a part of one, some four
    letters.
topics: How many groups of similar questions your rated replies have. "Seen" counts how often the
    model read such a reply as an example (the setting examples).
training: A longer lesson from all your ratings, in your pauses or by `ruvmlx learn consolidate`.
    A test decides whether its result is used.
version: What was learned up to one rating. Each rating makes a new version; /rollback returns to an
    old one.
"""
WORDS = {
    word: one_line(said) for word, said in re.findall(r"^(\S[^:]*): (.*(?:\n    .*)*)", TEXT, re.MULTILINE)
}


def explain(word: str) -> str:
    """Return the explanation of a word. If `word` is "", return the list of all words. Raise NotFound for a
    word without an explanation."""
    if not word:
        return f"/explain and one of these words: {', '.join(WORDS)}."
    names = {name.lower(): name for name in WORDS}
    wanted = word.strip().lower()
    name = names.get(wanted) or names.get(wanted.removesuffix("s"))
    if name is None:
        similar = did_you_mean(wanted, names)
        raise NotFound(f"there is no explanation of {word[:40]!r}.{similar} /explain lists the words")
    return f"{name}: {WORDS[name]}"
