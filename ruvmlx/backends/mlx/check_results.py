"""Results of the GPU kernels' self-check: one for each kernel, and the verdict over all of them."""

from dataclasses import dataclass

from ...models.model import ModelConfig
from ...text import one_line

GRAPH = "mlx"  # name of the check of mlx-lm's own graph, without our kernels
SKIPPED = "not checked: the check ended before it"
GPU_ERRORS = RuntimeError, ValueError, MemoryError  # what MLX raises where a GPU cannot compute
MAX_REASON_CHARACTERS, MAX_CHAT_REASON_CHARACTERS = (
    160,
    70,
)  # longest reason, in characters: in a row of `doctor`, in the chat's line
ERROR_LINES = 3  # of a compiler that are shown, each of at most MAX_REASON_CHARACTERS
WHOLE = 20_000  # longest message that is kept for the report, in characters


@dataclass(frozen=True)
class Shapes:
    """The properties of a model that decide how a kernel is compiled and run. dtype: "float16", "bfloat16" or
    "float32"."""

    head_dim: int
    n_heads: int
    n_kv_heads: int
    dtype: str

    @classmethod
    def of(cls, model: ModelConfig, dtype: str) -> "Shapes":
        return cls(model.head_dim, model.n_heads, model.n_kv_heads, dtype)


STARTER = Shapes(64, 9, 3, "float16")


@dataclass(frozen=True)
class CheckResult:
    """Result for one kernel.

    why: what is wrong, on one line. ratio: its time divided by plain MLX's, None where it was not timed.
    message: the whole error that `why` is made of, for the report; a compiler's has many lines.
    """

    name: str
    ok: bool
    why: str = ""
    ratio: float | None = None
    message: str = ""

    @classmethod
    def of_error(cls, name: str, message: str, otherwise: str = "failed without a message") -> "CheckResult":
        """A failure with this message. otherwise: the reason where the message is empty."""
        return cls(name, False, reason(message) or otherwise, message=message[:WHOLE])

    @property
    def words(self) -> str:
        if not self.ok:
            return f"{self.name}: {self.why}"
        return f"{self.name} ok" + (f" ({self.ratio:.2g}x MLX's time)" if self.ratio is not None else "")


@dataclass(frozen=True)
class KernelVerdict:
    """Results of all kernels. told: the check really ran, so the verdict may be kept for later starts."""

    results: tuple[CheckResult, ...]
    seconds: float = 0.0
    told: bool = True

    @property
    def graph_fails(self) -> str:
        """Why mlx-lm's own graph cannot run on the GPU; empty when it can, or when that is unknown."""
        return next((r.why for r in self.results if r.name == GRAPH and not r.ok), "")

    @property
    def kernels_work(self) -> bool:
        """Whether all kernels work: a tiered cache needs each of them. False also where no kernel exists for
        the shapes."""
        kernels = [r for r in self.results if r.name != GRAPH]
        return bool(kernels) and all(r.ok for r in kernels)

    @property
    def caveat(self) -> str:
        """One line for the user; "" where nothing failed."""
        wrong = next((r for r in self.results if not r.ok), None)
        if wrong is None:
            return ""
        reason = shorten(wrong.words, MAX_CHAT_REASON_CHARACTERS)
        return (
            f"Our GPU kernels are not used on this machine ({reason}); "
            "replies come from MLX's own attention with a plain KV cache. `ruvmlx doctor` checks again."
        )


def reason(text: str) -> str:
    """An error's message on one line, made of lines of at most MAX_REASON_CHARACTERS.

    A compiler says what is wrong in its `error:` lines: the first three of them. Without any, the first line.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line][:ERROR_LINES]
    return "; ".join(shorten(one_line(line), MAX_REASON_CHARACTERS) for line in errors or lines[:1])


def shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
