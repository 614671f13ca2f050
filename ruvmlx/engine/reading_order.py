"""This module decides in which order prompts are read. Among prompts of equal priority, no prompt is ready
later (apart from the time for one piece of a prompt) than if all prompts were read at once with equal shares
of the speed.

Imagine a machine that reads all waiting prompts at once, each with an equal share of its speed. On that
machine each prompt ends at a certain moment. The real machine reads the prompts one after the other, in the
order in which the imagined machine would end them. So, apart from the time for one piece of a prompt, no
prompt ends later than on the imagined machine, and a short prompt overtakes a long one. A prompt of a higher
priority has a larger share. (Friedman & Henderson 2003, "Fairness and efficiency in web server protocols")
"""

from dataclasses import dataclass

MORE = 8.0  # each step of priority multiplies a prompt's share of the speed by MORE
FIRST = 32  # the maximum number of tokens of a piece of a prompt before the reading pace was measured
# The number of tokens in one panel of the kernels. While other replies wait, a piece of a prompt has at least
# PANEL tokens, unless the rest of the chunk or of the prompt is shorter. Except in the last two pieces of a
# chunk or of a prompt, the number of tokens is a multiple of PANEL. For each piece, the machine reads all
# weights, so smaller pieces would be slow.
PANEL = 16


class ReadingPace:
    """The measured speed at which prompts are read. It decides how long a piece of a prompt is.

    speed: prompt tokens per second, in the newest pieces; 0: not measured yet
    """

    def __init__(self) -> None:
        self.speed = 0.0

    def piece(self, seconds: float) -> int:
        """Return the maximum number of tokens of a piece that takes about `seconds`."""
        tokens = int(seconds * self.speed) if self.speed else FIRST
        return max(PANEL, tokens + -tokens % PANEL)

    def measure(self, tokens: int, seconds: float, most: int) -> None:
        """Update the speed: to the speed of a slower piece, or to the mean of the old speed and the speed of
        a faster piece. Ignore pieces below `most` / 2 tokens, because fixed costs dominate them."""
        if 2 * tokens >= most and seconds > 0:
            speed = tokens / seconds
            self.speed = min(speed, (self.speed + speed) / 2) if self.speed else speed


@dataclass(eq=False)
class Place:
    """The place of one prompt in the order in which prompts are read.

    end: the moment at which the imagined machine ends the prompt; the prompt with the smallest end is read
        first
    share: the prompt's share of the imagined machine's speed
    unread: the expected number of tokens that the real machine still has to read
    """

    end: float
    share: float
    unread: float = 0.0


class ReadingOrder:
    """ReadingOrder computes the order in which prompts are read. The class measures work in prompt tokens,
    although a token of a long prompt takes a little longer. Both machines do the same work. Otherwise, the
    list of prompts that the imagined machine has not read would grow."""

    def __init__(self) -> None:
        # the number of tokens that the imagined machine has read so far of a prompt with share 1 that was
        # there from the start
        self._clock = 0.0
        self._read_there: list[Place] = []  # prompts that the imagined machine has not read to the end

    def join(self, tokens: int, priority: int = 0) -> Place:
        """Add a prompt that has arrived. tokens: the expected number of prompt tokens that must be read."""
        share = MORE**priority
        place = Place(self._clock + tokens / share, share, tokens)
        self._read_there.append(place)
        return place

    def count(self, place: Place, tokens: int) -> None:
        """Note that the real machine has read `tokens` tokens of a prompt. The imagined machine (module
        docstring) reads as many tokens of all its prompts."""
        place.unread -= tokens
        self._read(tokens)

    def leave(self, place: Place) -> None:
        """Drop the tokens that the real machine will not read: the prompt was cancelled, or a KV cache had
        more of its tokens than expected. If the imagined machine has read some of these tokens, it reads as
        many tokens of the other prompts."""
        unread, place.unread = max(0.0, place.unread), 0.0
        left = max(0.0, place.end - self._clock) * place.share
        place.end -= min(unread, left) / place.share
        self._read(max(0.0, unread - left))

    def _read(self, tokens: float) -> None:
        while self._read_there:
            first = min(self._read_there, key=lambda place: place.end)
            shares, rest = sum(place.share for place in self._read_there), first.end - self._clock
            if tokens < rest * shares:
                self._clock += tokens / shares
                return
            tokens -= rest * shares
            self._clock = first.end
            self._read_there.remove(first)
