"""All errors that are shown to users.

Each is one line: what failed, what was given, what was expected, what to do next. `exit_code` is the exit
code of the command line (docs/scripts.md).
"""

from .text import one_line, size


class RuvmlxError(Exception):
    """Base of all errors that are shown to users."""

    exit_code = 1


class UsageError(RuvmlxError):
    """The request itself is wrong: an empty prompt, a flag out of range, a prompt longer than the context."""

    exit_code = 2


class ModelNotFound(RuvmlxError):
    """No such model on this machine, and it could not be fetched."""

    exit_code = 3


class CorruptFile(RuvmlxError):
    """A file is damaged: truncated, changed, or with wrong shapes."""

    exit_code = 4


class UnsupportedModel(RuvmlxError):
    """An intact file of a kind that this runtime does not support."""


class PromptTooLong(UsageError):
    """A prompt that leaves no room for a reply in the context. tokens: of the prompt; limit: the most that
    may be read."""

    def __init__(self, tokens: int, limit: int, model: str):
        super().__init__(
            f"the prompt is {tokens} tokens; {model} reads at most {limit} and needs room for a reply. "
            "Shorten it."
        )
        self.tokens, self.limit = tokens, limit


class CacheTooLarge(RuvmlxError):
    """A request whose KV cache does not fit into the budget, even alone. prompt: tokens; reply: the most."""

    def __init__(self, prompt: int, reply: int, nbytes: int, budget: int, replies: int = 1):
        times = f"{replies} times " if replies > 1 else ""
        super().__init__(
            f"a prompt of {prompt} tokens and {times}up to {reply} of reply (max_tokens) need a KV cache of "
            f"{size(nbytes)}; the budget is {size(budget)}. Shorten the prompt, ask for "
            f"fewer tokens{' or replies' if times else ''}, or raise kv_budget."
        )
        self.tokens, self.nbytes, self.budget = prompt + reply, nbytes, budget


class MemoryBusy(RuvmlxError):
    """A request that waited for memory for too long, or behind too many others."""

    exit_code = 5

    def __init__(self, need: int, free: int, budget: int):
        super().__init__(
            f"no memory is free for this request: its KV cache needs {size(need)}, and "
            f"{size(free)} of {size(budget)} are free. Try again later, or ask for fewer tokens (max_tokens)."
        )
        self.need, self.free, self.budget = need, free, budget


class GPUFailed(RuvmlxError):
    """MLX cannot compute on this machine's GPU. instead: the backend that runs the model without it."""

    def __init__(self, why: str, instead: str = "native"):
        super().__init__(
            f"MLX cannot compute on this machine's GPU ({why}). Use --backend {instead}, or update the "
            "system and MLX; `ruvmlx doctor` checks the GPU again."
        )
        self.why = why


class AdapterMismatch(RuvmlxError):
    """An adapter that was made for another model."""


class StoreError(RuvmlxError):
    """The user's data cannot be read or written."""


class StoreBusy(StoreError):
    """Another process has locked the store."""

    exit_code = 5


class NotFound(RuvmlxError):
    """No such reply, session or adapter."""


class Interrupted(RuvmlxError):
    """The user stopped the operation."""

    exit_code = 130


def error_line(error: BaseException) -> str:
    """Any error as one line; with its class only if its text was not written for users."""
    text = one_line(str(error))
    if isinstance(error, RuvmlxError):
        return text
    return f"unexpected {type(error).__name__}: {text}" if text else f"unexpected {type(error).__name__}"
