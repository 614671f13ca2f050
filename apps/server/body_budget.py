"""The memory that bodies of requests take, all together."""

from dataclasses import dataclass

from .errors import ApiError


@dataclass
class HeldBodies:
    """limit: bytes; held: of the bodies that are being read, or whose requests are being answered."""

    limit: int
    held: int = 0


class HeldBody:
    """The part of one body that has been read. Call `release` when its request is answered."""

    def __init__(self, bodies: HeldBodies):
        self._bodies, self._pieces, self._size = bodies, list[bytes](), 0
        self._refused: ApiError | None = None

    def add(self, piece: bytes) -> None:
        """Keep a piece, unless there is no room for it; then the body is given up."""
        bodies, count = self._bodies, len(piece)
        if self._refused is None and bodies.held + count > bodies.limit:
            self._refused = ApiError(
                503,
                f"the bodies of other requests take {bodies.held} of {bodies.limit} bytes; try again.",
                code="bodies_busy",
            )
            self.release()
        if self._refused is None:
            self._pieces.append(piece)
            self._size += count
            bodies.held += count

    def whole(self) -> bytes:
        """The body; ApiError if it was given up."""
        if self._refused is not None:
            raise self._refused
        return b"".join(self._pieces)

    def release(self) -> None:
        self._bodies.held -= self._size
        self._pieces, self._size = [], 0
