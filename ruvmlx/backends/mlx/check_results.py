"""This module has the classes for the results of the GPU kernels' self-check: CheckResult for one kernel, and
KernelVerdict for all kernels."""

from dataclasses import dataclass

from ...models.config.model import ModelConfig
from ...text import one_line

GRAPH = "mlx"  # the name of that part of the check that runs mlx-lm's own graph without ruvmlx's kernels
SKIPPED = "not checked: the check ended before it"
# the types of the errors that MLX raises if a GPU cannot compute
GPU_ERRORS = RuntimeError, ValueError, MemoryError
# The maximum length of a reason (the text of an error), in characters: in a row of the command `doctor`, and
# in the chat.
MAX_REASON_CHARACTERS, MAX_CHAT_REASON_CHARACTERS = 160, 70
ERROR_LINES = 3  # the maximum number of a compiler's error lines in the text that `reason` returns
WHOLE = 20_000  # the maximum number of characters of a message that is kept for the report


@dataclass(frozen=True)
class Shapes:
    """The sizes of a model's heads and the dtype, which decide how a GPU kernel is compiled and run.

    dtype: "float16", "bfloat16" or "float32".
    alibi: True if the attention adds ALiBi's biases to the scores.
    """

    head_dim: int
    n_heads: int
    n_kv_heads: int
    dtype: str
    alibi: bool = False

    @classmethod
    def of(cls, model: ModelConfig, dtype: str) -> "Shapes":
        return cls(model.head_dim, model.n_heads, model.n_kv_heads, dtype, model.alibi_bias_max > 0)


STARTER = Shapes(64, 9, 3, "float16")


@dataclass(frozen=True)
class CheckResult:
    """The result of the self-check for one kernel.

    why: the error, as one line of text; "": the kernel works
    ratio: the kernel's time divided by the time of plain MLX; None: the kernel was not timed
    message: the complete error, for the report; a compiler's error has many lines
    """

    name: str
    ok: bool
    why: str = ""
    ratio: float | None = None
    message: str = ""

    @classmethod
    def of_error(cls, name: str, message: str, otherwise: str = "failed without a message") -> "CheckResult":
        """Return the result of a kernel that failed with this message. otherwise: the text of `why` if the
        message is empty."""
        return cls(name, False, reason(message) or otherwise, message=message[:WHOLE])

    @property
    def words(self) -> str:
        if not self.ok:
            return f"{self.name}: {self.why}"
        return f"{self.name} ok" + (f" ({self.ratio:.2g}x MLX's time)" if self.ratio is not None else "")


@dataclass(frozen=True)
class KernelVerdict:
    """The results of all kernels. told: False if the child process of the check reported no list of kernels;
    the program does not store such a verdict."""

    results: tuple[CheckResult, ...]
    seconds: float = 0.0
    told: bool = True

    @property
    def graph_fails(self) -> str:
        """Return why mlx-lm's own graph cannot run on the GPU. Return "" if the graph can run, or if the
        check of the graph has no result."""
        return next((r.why for r in self.results if r.name == GRAPH and not r.ok), "")

    @property
    def kernels_work(self) -> bool:
        """Return True only if all kernels work, because a tiered cache needs each kernel. Return False if no
        kernel exists for the model's shapes."""
        kernels = [r for r in self.results if r.name != GRAPH]
        return bool(kernels) and all(r.ok for r in kernels)

    @property
    def caveat(self) -> str:
        """Return one line for the user about the first result that is not ok, or "" if all results are ok
        (also if no kernel exists for the model's shapes)."""
        wrong = next((r for r in self.results if not r.ok), None)
        if wrong is None:
            return ""
        reason = shorten(wrong.words, MAX_CHAT_REASON_CHARACTERS)
        return (
            f"Our GPU kernels are not used on this machine ({reason}); "
            "replies come from MLX's own attention with a plain KV cache. `ruvmlx doctor` checks again."
        )


def reason(text: str) -> str:
    """Return the important lines of an error's message on one line, each shortened to MAX_REASON_CHARACTERS.

    A compiler describes the errors in lines with `error:`; the result has the first three of these lines. If
    the message has no line with `error:`, the result has the message's first line.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line][:ERROR_LINES]
    return "; ".join(shorten(one_line(line), MAX_REASON_CHARACTERS) for line in errors or lines[:1])


def shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
