"""What a rule that may end a text looks like."""

from __future__ import annotations

from typing import Protocol

from specdec.types import FinishReason


class TextStop(Protocol):
    """Reads a text one character at a time. Places are counted in characters from the text's start.

    A rule sees every character, those that another rule cuts off too, and keeps no more than it needs to decide.
    """

    @property
    def reason(self) -> FinishReason:
        """Why a text that it ends has ended."""

    @property
    def safe(self) -> int:
        """Text before this place will not be cut off by this rule, whatever comes."""

    def feed(self, char: str) -> int | None:
        """Take the next character; the place where the text ends, if it does."""

    def end(self) -> int | None:
        """The text ended by itself; the place where it should have, if that is earlier."""
