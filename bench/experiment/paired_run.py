"""Asks both arms the same, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from bench.experiment.board import Board
from bench.experiment.open_arm import OpenArm
from bench.experiment.pulse import Pulse
from bench.experiment.run_clock import RunClock
from bench.experiment.run_folder import RunFolder
from bench.experiment.script import Script
from bench.experiment.stop_rule import StopRule
from bench.experiment.to_record import prompt_of, to_record
from bench.experiment.turn import Turn
from bench.serve.load_run import LoadRun
from bench.serve.record import Record as Seen
from bench.serve.timed_ask import TimedAsk


class PairedRun:
    """A turn's records are written together once both arms were asked, pair by pair: a kill leaves at most one record
    alone, which the analysis leaves out. by_ids: outputs are compared by token ids, else by text."""

    def __init__(
        self, folder: RunFolder, arms: tuple[OpenArm, OpenArm], by_ids: bool, watch: Callable[[Board], None]
    ) -> None:
        self._folder, self._arms, self._by_ids, self._watch = folder, arms, by_ids, watch
        self._config = folder.manifest.config
        self._script = Script(self._config, folder.attempt)
        self._stop = StopRule(folder.manifest, folder.log)
        self._pulse = Pulse(folder.path)
        self.board = Board(self._config, self._script.planned)
        self.board.add(folder.log.records)

    async def run(self) -> str:
        """Ask what is left to ask; says why it ended.

        Raises:
            ExperimentError: the servers answer nothing any more, or a record can not be written.
        """
        done = [number for pair in self.board.done if (number := self._script.number(pair)) is not None]
        turns = self._script.turns(frozenset(done))
        clock = RunClock(self._folder.started_s)
        if why := self._why(clock):
            return why
        for first in turns:
            for turn in self._script.warm_up():
                await self._take(turn, clock, warm_up=True)
            clock.begin()
            for turn in itertools.chain([first], turns):
                await self._take(turn, clock)
                if why := self._why(clock):
                    return why
        return "everything planned was asked"

    def _why(self, clock: RunClock) -> str:
        return self._stop.why(len(self.board.done), len(self.board.mismatched), clock.spent_s)

    async def _take(self, turn: Turn, clock: RunClock, *, warm_up: bool = False) -> None:
        seen: list[dict[str, Seen]] = [{}, {}]
        for arm in (turn.first, 1 - turn.first):
            seen[arm] = await self._play(arm, turn)
        records = [
            to_record(
                seen[arm][asked.pair], ask=asked.ask, arm=self._arms[arm].name, zero_s=clock.zero_s,
                scheduled=self._config.load.open_loop, by_ids=self._by_ids, pair=asked.pair, warm_up=warm_up,
                prompt=prompt_of(asked.ask) if self._config.store_prompts else None,
            )
            for asked in turn.asks for arm in (0, 1)
        ]  # fmt: skip
        self._folder.write(records)
        self.board.add(records)
        self._watch(self.board)
        self._pulse.check(records)

    async def _play(self, arm: int, turn: Turn) -> dict[str, Seen]:
        """What an arm's requests of a turn came to, by pair."""
        load, open_arm = self._config.load, self._arms[arm]
        asks = [open_arm.request.apply(self._script.in_arm(arm, asked)) for asked in turn.asks]
        run = LoadRun(open_arm.endpoint, load.timeout_s)
        if load.open_loop:
            await run.on_schedule([TimedAsk(o.offset_s, ask) for o, ask in zip(turn.asks, asks, strict=True)])
        else:
            await run.in_turns(iter(asks), load.concurrency, len(asks), None)
        return {seen.name: seen for seen in run.records}
