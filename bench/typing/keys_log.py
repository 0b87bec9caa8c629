"""When keys were pressed and suggestions came, and how long somebody waited."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class KeysLog:
    """Seconds of one clock. ``answered_s[i]``: when the first text for the state after key i came, or the news that
    there is none; missing where the next key came first. ``with_text``: the keys whose answer was a text."""

    pressed_s: list[float] = field(default_factory=list)
    answered_s: dict[int, float] = field(default_factory=dict)
    with_text: set[int] = field(default_factory=set)
    continued: int = 0

    def press(self, now_s: float) -> int:
        """A key is pressed; its number, from 0."""
        self.pressed_s.append(now_s)
        return len(self.pressed_s) - 1

    def answer(self, key: int, now_s: float, *, text: bool) -> None:
        """News of the state after ``key``: a text, or that there is no more; later ones change nothing."""
        if key not in self.answered_s:
            self.answered_s[key] = now_s
            if text:
                self.with_text.add(key)

    def waits_ms(self, *, text_only: bool = False) -> list[float]:
        """Per key, from its press to the first answer for the text then or later: what is on the screen until then is
        about a text that is gone. A key after which nothing came any more has no wait. text_only: the news that there
        is nothing to suggest is no answer."""
        waits: list[float] = []
        soonest: float | None = None
        for key in range(len(self.pressed_s) - 1, -1, -1):
            at = self.answered_s.get(key) if key in self.with_text or not text_only else None
            if at is not None:
                soonest = at if soonest is None else min(soonest, at)
            if soonest is not None:
                waits.append((soonest - self.pressed_s[key]) * 1e3)
        return waits[::-1]

    @property
    def in_time(self) -> int:
        """Keys answered before the next one."""
        following = [*self.pressed_s[1:], float("inf")]
        return sum(self.answered_s.get(key, float("inf")) < after for key, after in enumerate(following))
