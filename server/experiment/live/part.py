"""One request's part in an experiment: the arm it got, and what is noted of it while it runs."""

from __future__ import annotations

from collections.abc import Callable

from server.experiment.live.choice import Choice
from server.telemetry.request_record import RequestRecord
from specdec.types import Delta, RequestEvent


class Part:
    """A `RequestWatcher`. ``name`` is unique in the experiment, over restarts too. ``in_flight`` tells how many
    requests the engine has. ``tokens``: (sample, token ids) of each message, kept where ``keeps_tokens``."""

    __slots__ = ("_in_flight", "_on_end", "choice", "chunks", "events", "flights", "name", "overridden", "tokens")

    def __init__(
        self,
        name: str,
        choice: Choice,
        in_flight: Callable[[], int],
        on_end: Callable[[Part, RequestRecord], None],
        *,
        overridden: bool = False,
        keeps_tokens: bool = False,
    ) -> None:
        self.name, self.choice, self.overridden = name, choice, overridden
        self.tokens: list[tuple[int, list[int]]] | None = [] if keeps_tokens else None
        self.chunks = self.events = self.flights = 0
        self._in_flight, self._on_end = in_flight, on_end

    @property
    def counts(self) -> bool:
        """Whether its record will be analysed."""
        return not (self.overridden or self.choice.warm_up)

    @property
    def batch(self) -> float:
        """Mean number of requests in the engine whenever it said something of this one."""
        return self.flights / self.events if self.events else 0.0

    def saw(self, event: RequestEvent) -> None:
        """The engine said something of it."""
        self.events += 1
        self.flights += self._in_flight()
        if isinstance(event, Delta):
            if event.text:
                self.chunks += 1
            if self.tokens is not None:
                self.tokens.append((event.index, event.token_ids))

    def ended(self, record: RequestRecord) -> None:
        """Nothing more comes."""
        self._on_end(self, record)
