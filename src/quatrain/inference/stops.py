"""Where a text ends: stop texts, which may be spread over several ids."""

from collections.abc import Sequence


class StopTexts:
    """Passes text on up to the first stop text, which may be spread over several ids."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.text = ""  # all that has been passed on
        self.held = ""  # may be the beginning of a stop text
        self.found = False

    def push(self, piece: str) -> str:
        """The text that is certain not to belong to a stop text."""
        if self.found:
            return ""
        self.held += piece
        places = [place for place in (self.held.find(stop) for stop in self.stops) if place >= 0]
        if places:
            self.found = True
            return self._pass_on(min(places), drop=True)
        possible = max((_overlap(self.held, stop) for stop in self.stops), default=0)
        return self._pass_on(len(self.held) - possible)

    def end(self) -> str:
        """What was held back, when no text follows."""
        return "" if self.found else self._pass_on(len(self.held))

    def _pass_on(self, count: int, drop: bool = False) -> str:
        certain, self.held = self.held[:count], "" if drop else self.held[count:]
        self.text += certain
        return certain


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text with which the stop text begins."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def ids_of(length: int, ends: list[int]) -> int:
    """How many ids the first `length` characters take, given the characters complete behind each id."""
    if length == 0:
        return 0
    # Not the last such id: those behind it may be the first bytes of a character that the stop text begins with.
    return ends.index(length) + 1 if length in ends else sum(end < length for end in ends)
