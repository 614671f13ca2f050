"""This module reads from the environment which rank of how many this process is. `ruvmlx launch` sets the
environment. The module imports nothing large."""

import os
from dataclasses import dataclass

RANKS, LEADER, KEY, BACKEND = "RUVMLX_RANKS", "RUVMLX_LEADER", "RUVMLX_LAUNCH_KEY", "RUVMLX_RING"
LAST_LINE = "RUVMLX_LAUNCH_LAST_LINE"  # the file for the last line of a rank 0 that ends itself
LOST = 75  # the exit code of a rank that lost another one
_RANK_NAMES = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # mlx.launch, Open MPI, other MPI programs


@dataclass(frozen=True)
class RankPlace:
    """The place of this process among the ranks. leader: the address of rank 0, where the other ranks
    connect. key: a random text of this start. backend: MLX's name of the connection for sums."""

    rank: int
    ranks: int
    leader: tuple[str, int]
    key: str
    backend: str

    @classmethod
    def of_environment(cls) -> "RankPlace":
        host, _, port = os.environ[LEADER].rpartition(":")
        number = next((os.environ[name] for name in _RANK_NAMES if name in os.environ), "0")
        backend = os.environ.get(BACKEND, "ring")
        return cls(int(number), ranks(), (host, int(port)), os.environ[KEY], backend)


def ranks() -> int:
    """Return the number of processes over which models are divided; 1 without `ruvmlx launch`."""
    return int(os.environ.get(RANKS, "1"))


def all_are_here() -> bool:
    """Return True if all ranks are processes of this machine, as `ruvmlx launch -n` starts them."""
    return os.environ.get(LEADER, "").startswith("127.0.0.1:")


def reason_against_training() -> str:
    """Return why this process cannot train, because it has only a shard of the model; "": it can."""
    if ranks() == 1:
        return ""
    return (
        "training needs the whole model in one process: run it without `ruvmlx launch`. Ratings change the "
        "output head over several machines, too"
    )
