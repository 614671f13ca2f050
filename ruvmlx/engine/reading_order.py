"""The order in which prompts are read: no prompt is ready later than by equal shares.

Imagine a machine that reads all waiting prompts at once, each with an equal share of its speed. There each
prompt ends at some moment. Here the prompts are read one after the other, in the order of these moments. So
none ends later than there, and a short prompt passes a long one. A prompt of a higher priority has a larger
share. (Friedman & Henderson 2003, "Fairness and efficiency in web server protocols")
"""

from dataclasses import dataclass

MORE = 8.0  # how much larger the share is with each step of priority


@dataclass(eq=False)
class Place:
    """Of one prompt. end: when the imagined machine ends it; the smallest is read first. share: of its
    speed."""

    end: float
    share: float


class ReadingOrder:
    """Counts work in prompt tokens. A token of a longer prompt costs somewhat more; that is left out."""

    def __init__(self) -> None:
        self._clock = 0.0  # tokens that the imagined machine has read of a prompt with share 1
        self._read_there: list[Place] = []  # prompts that it has not ended

    def join(self, tokens: int, priority: int = 0) -> Place:
        """A prompt has arrived. tokens: that are to be read of it."""
        share = MORE**priority
        place = Place(self._clock + tokens / share, share)
        self._read_there.append(place)
        return place

    def count(self, tokens: float) -> None:
        """So many tokens were read, of whichever prompt."""
        while tokens > 0 and self._read_there:
            first = min(self._read_there, key=lambda place: place.end)
            shares, rest = sum(place.share for place in self._read_there), first.end - self._clock
            if tokens < rest * shares:
                self._clock += tokens / shares
                return
            tokens -= rest * shares
            self._clock = first.end
            self._read_there.remove(first)

    def leave(self, place: Place) -> None:
        """The prompt will not be read to its end."""
        if place in self._read_there:
            self._read_there.remove(place)
