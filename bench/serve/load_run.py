"""One run of load: sends requests by a schedule or one after the other, and keeps what was seen of each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from bench.serve.ask import Ask
from bench.serve.endpoint import Endpoint
from bench.serve.lag_meter import LagMeter
from bench.serve.record import Record
from bench.serve.refused_error import RefusedError
from bench.serve.timed_ask import TimedAsk
from specdec.errors import SpecdecError

LEAD_S = 0.05
REFUSED_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0  # of one in a closed loop that was refused; the first without a hint


class LoadRun:
    """``records`` grow in the order of sending and may be looked at while it runs. Make one per run."""

    def __init__(self, endpoint: Endpoint, timeout_s: float = 120.0) -> None:
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._lag = LagMeter()
        self.records: list[Record] = []
        self.planned: int | None = None
        self.open_loop = False
        self.started_s = self.ended_s = 0.0

    @property
    def lags_ms(self) -> list[float]:
        """By how much our own event loop was late, sampled all the time."""
        return self._lag.lags_ms

    async def on_schedule(self, schedule: Seq[TimedAsk], start_s: float | None = None) -> None:
        """Send every request when it is due, whatever became of those before; returns when all have ended. ``start_s``:
        what the offsets count from, by the event loop's clock; None: now.

        A request's times count from when it was due, so one that a slow server would have kept us from sending is not
        left out (coordinated omission).
        """
        self.open_loop, self.planned = True, len(schedule)
        clock = asyncio.get_running_loop().time
        self.started_s = clock() + LEAD_S if start_s is None else start_s
        async with self._lag, asyncio.TaskGroup() as tasks:
            for offset_s, ask in schedule:
                record = Record(ask.name, self.started_s + offset_s)
                await asyncio.sleep(max(0.0, record.due_s - clock()))
                tasks.create_task(self._send(ask, record))
        self.ended_s = clock()

    async def in_turns(self, asks: Iterator[Ask], at_once: int, count: int | None, duration_s: float | None) -> None:
        """Keep ``at_once`` requests running until ``count`` were sent or ``duration_s`` has passed; those that run
        then are waited for."""
        self.planned = count
        clock = asyncio.get_running_loop().time
        self.started_s = clock()
        left = iter(range(count)) if count is not None else iter(int, 1)

        async def turns() -> None:
            while (duration_s is None or clock() < self.started_s + duration_s) and next(left, None) is not None:
                ask = next(asks)
                record = Record(ask.name, clock())
                await self._send(ask, record)
                if not record.ok:
                    await asyncio.sleep(min(record.retry_after_s or REFUSED_PAUSE_S, LONGEST_PAUSE_S))

        async with self._lag, asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(turns())
        self.ended_s = clock()

    async def _send(self, ask: Ask, record: Record) -> None:
        clock = asyncio.get_running_loop().time
        record.sent_s = clock()
        self.records.append(record)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._endpoint.send(ask, record)
        except TimeoutError:
            record.outcome, record.error = "cut", f"no end within {self._timeout_s:g} s"
        except RefusedError as error:
            record.outcome, record.error, record.retry_after_s = "refused", str(error), error.retry_after_s
        except SpecdecError as error:
            record.outcome, record.error = "failed", str(error)
        finally:
            record.end_s = clock()
