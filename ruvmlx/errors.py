"""This module defines the errors that the program shows to users.

The text of an error is one line. The text says what failed and, where this helps, which value the user gave,
which values are allowed, and how to continue. `exit_code` is the exit code of the command line program
(docs/scripts.md).
"""

import errno

from .text import one_line, size


class RuvmlxError(Exception):
    """The base class of the errors that the program foresees and shows to users."""

    exit_code = 1


class UsageError(RuvmlxError):
    """The user's request is wrong, for example an empty prompt, a flag out of range, or a prompt that is
    longer than the context."""

    exit_code = 2


class ModelNotFound(RuvmlxError):
    """The model is not on this machine, and the program could not download the model."""

    exit_code = 3


class CorruptFile(RuvmlxError):
    """A file is damaged or has the wrong format: for example, it is truncated, its bytes were changed, or an
    array in it has a wrong shape."""

    exit_code = 4


class UnsupportedModel(RuvmlxError):
    """The files of a model are intact, but ruvmlx does not support this kind of model."""


class BadPrompt(UsageError):
    """The model cannot read the prompt: it is empty, it is too long, or it has a token id that the model does
    not have."""


class PromptTooLong(BadPrompt):
    """The prompt leaves no room for a reply in the model's context.

    tokens: the number of prompt tokens, or less, because a prompt is not read to its end once it is too long.
    limit: the maximum number of prompt tokens."""

    def __init__(self, tokens: int, limit: int, model: str):
        super().__init__(
            f"the prompt is at least {tokens} tokens; {model} reads at most {limit} and needs room for a "
            "reply. Shorten it."
        )
        self.tokens, self.limit = tokens, limit


class TextTooLong(UsageError):
    """A text to embed has more tokens than the model reads for one vector."""


class CacheTooLarge(RuvmlxError):
    """The KV cache of one request is larger than the whole memory budget.

    prompt: the number of prompt tokens. reply: the maximum number of tokens of the reply."""

    def __init__(self, prompt: int, reply: int, nbytes: int, budget: int, replies: int = 1):
        times = f"{replies} times " if replies > 1 else ""
        super().__init__(
            f"a prompt of {prompt} tokens and {times}up to {reply} of reply (max_tokens) need a KV cache of "
            f"{size(nbytes)}; the budget is {size(budget)}. Shorten the prompt, ask for "
            f"fewer tokens{' or replies' if times else ''}, or raise kv_budget."
        )
        self.tokens, self.nbytes, self.budget = prompt + reply, nbytes, budget


class MemoryBusy(RuvmlxError):
    """A request got no memory for its KV cache: it waited too long, too many other requests waited before it,
    or no running request can free memory."""

    exit_code = 5

    def __init__(self, need: int, free: int, budget: int):
        super().__init__(
            f"no memory is free for this request: its KV cache needs {size(need)}, and "
            f"{size(free)} of {size(budget)} are free. Try again later, or ask for fewer tokens (max_tokens)."
        )
        self.need, self.free, self.budget = need, free, budget


class GPUFailed(RuvmlxError):
    """MLX cannot compute on this machine's GPU. instead: the name of a backend that the user can choose and
    that needs no GPU."""

    def __init__(self, why: str, instead: str = "native"):
        super().__init__(
            f"MLX cannot compute on this machine's GPU ({why}). Use --backend {instead}, or update the "
            "system and MLX; `ruvmlx doctor` checks the GPU again."
        )
        self.why = why


class SideFailed(RuvmlxError):
    """One side of the hybrid backend has failed. The other side can do the work if the caller asks again."""


class AdapterMismatch(RuvmlxError):
    """The adapter, or the reply from which it must learn, belongs to another model."""


class StoreError(RuvmlxError):
    """The program cannot read or write the store, the database with the user's data."""


class StoreBusy(StoreError):
    """Another process has locked the store."""

    exit_code = 5


class ModelClosed(RuvmlxError):
    """The model was closed, or another model replaced it. The same request can succeed later."""


class NotFound(RuvmlxError):
    """A named reply, chat, adapter or other object does not exist, or no adapter is in use."""


class Interrupted(RuvmlxError):
    """The user, or the end of the program, stopped the operation."""

    exit_code = 130


def extra_missing(extra: str) -> str:
    """Return the instruction to install one of the extras of pyproject.toml. No package index has ruvmlx, so
    the commands install the extra from a clone.

    >>> extra_missing("pdf")
    "in the clone of ruvmlx, run `uv sync --inexact --extra pdf` or `pip install '.[pdf]'`"
    """
    return f"in the clone of ruvmlx, run `uv sync --inexact --extra {extra}` or `pip install '.[{extra}]'`"


def unreadable(name: str, error: OSError | UnicodeDecodeError) -> UsageError:
    """Return the error for a file of the user. The program cannot read the file, or cannot read it as text.
    The last sentence of the error says what to do."""
    name = one_line(name)
    if isinstance(error, UnicodeDecodeError):
        return UsageError(f"{name} is not UTF-8 text (byte {error.start}). Convert it to UTF-8.")
    steps = {errno.ENOENT: "Check the name.", errno.EACCES: "Change its access rights, or name another file."}
    step = steps.get(error.errno or 0, "Name another file.")
    return UsageError(f"cannot read {name}: {error.strerror}. {step}")


def error_line(error: BaseException) -> str:
    """Return the text of any error as one line. If the error is no RuvmlxError, the line begins with the name
    of the error's class."""
    text = one_line(str(error))
    if isinstance(error, RuvmlxError):
        return text
    return f"unexpected {type(error).__name__}: {text}" if text else f"unexpected {type(error).__name__}"
