"""What became of the suggestions that an editor was given."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from server.lsp.position_encoding import PositionEncoding
from specdec.client.completion_client import Outcome

REMEMBERED = 512
_WAITING = 256
Report = Callable[[str, Outcome, int, float], Awaitable[None]]


class _Given:
    """A suggestion, behind ``lead`` characters that the editor's own menu put there."""

    def __init__(self, text: str, lead: int) -> None:
        self.text, self.lead = text, lead
        self.shown_s: float | None = None
        self.taken = 0
        self.closed = False


class Outcomes:
    """Tells them to ``report``, one after the other, in the background. ``clock`` gives monotonic seconds. `run` it."""

    def __init__(self, report: Report, clock: Callable[[], float] = time.monotonic) -> None:
        self._report, self._clock = report, clock
        self._given: OrderedDict[str, _Given] = OrderedDict()
        self._untold: asyncio.Queue[tuple[str, Outcome, int, float]] = asyncio.Queue(_WAITING)

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            told = await self._untold.get()
            await self._report(*told)
            self._untold.task_done()

    async def settle(self) -> None:
        """Wait until all was told."""
        await self._untold.join()

    def given(self, suggestion_id: str, text: str, lead: int) -> None:
        """The editor was given ``text``, whose first ``lead`` characters are not the model's."""
        self._given[suggestion_id] = _Given(text, lead)
        while len(self._given) > REMEMBERED:
            self._given.popitem(last=False)

    def shown(self, suggestion_id: str) -> None:
        """The user sees it."""
        found = self._given.get(suggestion_id)
        if found is not None and found.shown_s is None and not found.closed:
            found.shown_s = self._clock()
            self._tell(suggestion_id, found, "shown", 0)

    def accepted(self, suggestion_id: str) -> None:
        """The user took all of it."""
        found = self._given.get(suggestion_id)
        if found is not None and not found.closed:
            found.closed = True
            self._tell(suggestion_id, found, "accepted", len(found.text) - found.lead)

    def partly_accepted(self, suggestion_id: str, length: int) -> None:
        """The user took its first ``length`` 16-bit units."""
        found = self._given.get(suggestion_id)
        if found is None or found.closed:
            return
        characters = max(0, PositionEncoding.UTF16.place_in(found.text, length) - found.lead)
        if characters >= len(found.text) - found.lead:
            self.accepted(suggestion_id)
        elif characters > found.taken:
            found.taken = characters
            self._tell(suggestion_id, found, "partially_accepted", characters)

    def dismissed(self, suggestion_id: str) -> None:
        """The user did not want it, or no more of it."""
        found = self._given.get(suggestion_id)
        if found is not None and not found.closed:
            found.closed = True
            if not found.taken:
                self._tell(suggestion_id, found, "rejected", 0)

    def _tell(self, suggestion_id: str, found: _Given, outcome: Outcome, characters: int) -> None:
        shown_ms = 0.0 if found.shown_s is None else (self._clock() - found.shown_s) * 1e3
        if not self._untold.full():
            self._untold.put_nowait((suggestion_id, outcome, characters, shown_ms))
