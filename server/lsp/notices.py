"""What a user is told, and how often."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

Show = Callable[[str], None]


class State(StrEnum):
    """What there is to show in a status bar."""

    CONNECTING = "connecting"
    READY = "ready"
    AWAY = "away"
    OFF = "off"


class Notices:
    """Each thing is said once, until it is `over`. ``show`` puts a line before the user's eyes, ``status`` shows a
    state, a line about it, and the model's name, without asking for attention."""

    def __init__(self, show: Show, status: Callable[[State, str, str], None]) -> None:
        self._show, self._status = show, status
        self._said: dict[str, str] = {}
        self._last: tuple[State, str, str] | None = None

    def tell(self, subject: str, text: str) -> None:
        """Say ``text``, unless something was said about ``subject`` that is not over."""
        if subject not in self._said:
            self._said[subject] = text
            self._show(text)

    def over(self, subject: str) -> None:
        """What is said about ``subject`` from now on is news."""
        self._said.pop(subject, None)

    def state(self, state: State, text: str = "", model: str = "") -> None:
        """What is so now."""
        if self._last != (state, text, model):
            self._last = (state, text, model)
            self._status(state, text, model)
