"""Places where a verb cannot do its work: the shim makes them of a usual disk."""

from dataclasses import dataclass

from .crash_trial import Mode


@dataclass(frozen=True)
class Place:
    """A place. below: the folder of the trial that is so, "" for all; word: an error there has this word."""

    name: str
    mode: Mode
    below: str
    word: str


PLACES = (
    Place("in a read-only data folder", Mode.READ_ONLY, "home", "read-only"),
    Place("on a file system whose locks fail (ENOLCK)", Mode.NO_LOCKS, "", "locks"),
    Place("on a file system without locks (EOPNOTSUPP)", Mode.LOCKS_UNKNOWN, "", "locks"),
    Place("with a full folder of temporary files", Mode.DISK_FULL, "tmp", "space"),
)
