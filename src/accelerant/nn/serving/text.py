"""The text of an answer while it grows: characters across tokens, stop strings across tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """The result of a tokenizer's `stream()`: text for tokens, where a character may need several of them."""

    def push(self, token: int) -> str:
        """Return the text that a token completes; "" while a character is unfinished."""

    def flush(self) -> str:
        """Return the text of what stayed unfinished."""


class StoppingText:
    """The text of one answer, which ends before the first stop string; what may begin one is held back."""

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._decoder, self._stops = decoder, tuple(stops)
        self._held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """Return the text that a token makes certain, and whether a stop string ends it."""
        return self._certain(self._decoder.push(token))

    def finish(self) -> tuple[str, bool]:
        """Return the text held back so far, and whether a stop string ends it."""
        text, stopped = self._certain(self._decoder.flush())
        text, self._held = text + ("" if stopped else self._held), ""
        return text, stopped

    def _certain(self, new: str) -> tuple[str, bool]:
        text = self._held + new
        found = [at for at in map(text.find, self._stops) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        held = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
