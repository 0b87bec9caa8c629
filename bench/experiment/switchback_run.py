"""Asks what arrives of one arm or the other, as time blocks have it."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from bench.experiment.board import Board
from bench.experiment.open_arm import OpenArm
from bench.experiment.paired_ask import PairedAsk
from bench.experiment.pulse import Pulse
from bench.experiment.run_clock import RunClock
from bench.experiment.run_folder import RunFolder
from bench.experiment.script import Script
from bench.experiment.switchback_script import SwitchbackScript
from bench.experiment.to_record import prompt_of, to_record
from bench.serve.load_run import LoadRun
from bench.serve.timed_ask import TimedAsk
from server.experiment.experiment_errors import ExperimentError
from server.experiment.record import NO_BLOCK

_LEAD_S = 0.25


class _Block(NamedTuple):
    """Offsets of ``asks`` count from the beginning of block 0."""

    number: int
    asks: list[PairedAsk]


class SwitchbackRun:
    """Requests arrive by one schedule, whatever becomes of those before; a block's arm serves those that arrive in it.
    A block's records are written together when its last request has ended, so that a kill does not keep its short
    requests and lose the long ones; a run that is taken up begins with the first block that has no record."""

    def __init__(
        self, folder: RunFolder, arms: tuple[OpenArm, OpenArm], by_ids: bool, watch: Callable[[Board], None]
    ) -> None:
        self._folder, self._arms, self._by_ids, self._watch = folder, arms, by_ids, watch
        self._config = folder.manifest.config
        self._script, self._slots = Script(self._config, folder.attempt), SwitchbackScript(self._config)
        self._clock = RunClock(folder.started_s)
        self._pulse = Pulse(folder.path)
        self.board = Board(self._config, None)
        self.board.add(folder.log.records)

    async def run(self) -> str:
        """Ask what is left to ask; says why it ended.

        Raises:
            ExperimentError: the servers answer nothing any more, or a record can not be written.
        """
        written = max((record.block for record in self._folder.log.records), default=NO_BLOCK)
        blocks = self._blocks(written + 1)
        for first in blocks:
            await self._warm_up()
            try:
                async with asyncio.TaskGroup() as tasks:
                    await self._send(first, blocks, tasks)
            except ExceptionGroup as group:
                for error in group.exceptions:
                    if isinstance(error, ExperimentError):
                        raise error from None
                raise
        return "everything planned was asked"

    async def _send(self, first: _Block, others: Iterator[_Block], tasks: asyncio.TaskGroup) -> None:
        now, block_s = asyncio.get_running_loop().time, self._config.assignment.block_s
        start_s = now() + _LEAD_S - first.number * block_s
        for block in itertools.chain([first], others):
            await asyncio.sleep(max(0.0, start_s + block.number * block_s - _LEAD_S - now()))
            tasks.create_task(self._serve(block, start_s))

    async def _serve(self, block: _Block, start_s: float) -> None:
        arm = self._slots.arm(block.number)
        asks = [self._arms[arm].request.apply(self._script.in_arm(arm, asked)) for asked in block.asks]
        run = LoadRun(self._arms[arm].endpoint, self._config.load.timeout_s)
        await run.on_schedule([TimedAsk(o.offset_s, ask) for o, ask in zip(block.asks, asks, strict=True)], start_s)
        self._keep(arm, run, block.asks, block.number)

    async def _warm_up(self) -> None:
        for turn in self._script.warm_up():
            for arm in (turn.first, 1 - turn.first):
                asks = [self._arms[arm].request.apply(self._script.in_arm(arm, asked)) for asked in turn.asks]
                run = LoadRun(self._arms[arm].endpoint, self._config.load.timeout_s)
                await run.in_turns(iter(asks), 1, len(asks), None)
                self._keep(arm, run, turn.asks, NO_BLOCK)

    def _keep(self, arm: int, run: LoadRun, asks: Sequence[PairedAsk], block: int) -> None:
        seen = {record.name: record for record in run.records}
        records = [
            to_record(
                seen[asked.pair], ask=asked.ask, arm=self._arms[arm].name, zero_s=self._clock.zero_s,
                scheduled=block != NO_BLOCK, by_ids=self._by_ids, block=block,
                warm_up=block == NO_BLOCK or self._slots.washes(asked.offset_s),
                prompt=prompt_of(asked.ask) if self._config.store_prompts else None,
            )
            for asked in asks
        ]  # fmt: skip
        self._folder.write(records)
        self.board.add(records)
        self._watch(self.board)
        self._pulse.check(records)

    def _blocks(self, first: int) -> Iterator[_Block]:
        """The blocks from ``first`` on that have requests."""
        stopping = self._config.stopping
        end_s = math.inf if stopping.max_duration is None else stopping.max_duration
        timed = enumerate(itertools.islice(self._script.schedule(), stopping.max_requests))
        planned = itertools.takewhile(lambda item: item[1].offset_s < end_s, timed)
        for number, group in itertools.groupby(planned, lambda item: self._slots.block(item[1].offset_s)):
            if number >= first:
                yield _Block(number, [self._script.paired(f"{n:06}", at, ask) for n, (at, ask) in group])
