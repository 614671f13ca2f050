"""Every error a user can meet.

One line each: what failed, what was got, what was expected, what to do next.
`exit_code` is what the command line returns; docs/scripts.md lists them.
"""


class RuvmlxError(Exception):
    """Base of all errors that are the user's business."""

    exit_code = 1


class UsageError(RuvmlxError):
    """The request itself is wrong: an empty prompt, a flag out of range, a prompt longer than the context."""

    exit_code = 2


class ModelNotFound(RuvmlxError):
    """No such model on this machine, and it could not be fetched."""

    exit_code = 3


class CorruptFile(RuvmlxError):
    """A file does not hold what its header says: truncated, mutated, or of wrong shapes."""

    exit_code = 4


class UnsupportedModel(RuvmlxError):
    """A sound file of a kind that this runtime does not run."""


class GPUFailed(RuvmlxError):
    """MLX cannot compute on this machine's GPU."""

    def __init__(self, why: str):
        super().__init__(
            f"MLX cannot compute on this machine's GPU ({why}). Use --backend native, or update the system "
            "and MLX; `ruvmlx doctor` checks the GPU again."
        )
        self.why = why


class AdapterMismatch(RuvmlxError):
    """An adapter that was made for another model."""


class StoreError(RuvmlxError):
    """The user's data cannot be read or written."""


class StoreBusy(StoreError):
    """Another process holds the store."""

    exit_code = 5


class NotFound(RuvmlxError):
    """No such reply, session or adapter."""


class Interrupted(RuvmlxError):
    """The user stopped it."""

    exit_code = 130
