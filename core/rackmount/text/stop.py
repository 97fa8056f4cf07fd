"""Stop strings in a text that comes in pieces: nothing of a stop string is ever given out."""

from collections.abc import Sequence

from rackmount_registry.errors import RequestError


class StopStrings:
    """Finds the first stop string that is complete.

    That is the one that ends first; of several that end together, the longest. The text is cut
    where it starts, or with `include_stop_str_in_output` where it ends. Text that may yet turn out
    to be the beginning of a stop string is held back, so the output does not depend on the pieces.

    Raises:
        ValueError: an empty stop string.
    """

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        if "" in stops:
            raise RequestError(f"stop={list(stops)!r} has an empty string; each needs a character")
        self._watches = [_Watch(stop) for stop in stops]
        self._include = include_stop_str_in_output
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text to give out, and the stop string that `text` completes: then the last call."""
        if not self._watches:
            return text, None
        start = len(self._held)
        text = self._held + text
        for end in range(start, len(text)):
            complete = [watch.stop for watch in self._watches if watch.advance(text[end])]
            if complete:
                stop = max(complete, key=len)
                self._held = ""
                return text[: end + 1 if self._include else end + 1 - len(stop)], stop
        safe = len(text) - max(watch.length for watch in self._watches)
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """What is held back, once, when no more text comes; empty after a match."""
        held, self._held = self._held, ""
        return held


class _Watch:
    """How much of one stop string the text ends with (Knuth, Morris and Pratt, 1977).

    Linear in the text, whatever the string.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        # borders[n - 1]: length of the longest proper prefix of stop[:n] that also ends it.
        self._borders = [0]
        for char in stop[1:]:
            self._borders.append(self._extend(self._borders[-1], char))

    def advance(self, char: str) -> bool:
        """Whether `char` completes the stop string."""
        self.length = self._extend(self.length, char)
        return self.length == len(self.stop)

    def _extend(self, length: int, char: str) -> int:
        while length and self.stop[length] != char:
            length = self._borders[length - 1]
        return length + (self.stop[length] == char)
