"""Long prompts on a virtual clock: their effect on streams, the waits of short requests, and starvation."""

from __future__ import annotations

import random

import pytest

from specdec.control.estimates.costs import CostTable
from specdec.control.prefill_pace import PrefillPace, StepTimes
from specdec.core.sequence import Sequence, SequencePhase
from specdec.core.tree import TokenTree
from specdec.engine.propose import Proposals
from specdec.engine.scheduler import PlanEntry, StepPlan
from specdec.engine.step import StepResult, _count_rows
from tests.core.kv_cache.sequences import make_request, make_samples
from tests.engine.scheduler.rig import Rig, queued

GRID, CONTEXTS = (1, 8, 64, 256), (0, 4000)
CHUNK = 192


def costs(times: float = 1.0) -> CostTable:
    """As of a small model on two cores: 6 ms and 0.5 a row, that grows by 0.5 with 2000 tokens of context."""
    return CostTable(GRID, CONTEXTS, [[times * (6 + (0.5 + c / 4000) * (r - 1)) for r in GRID] for c in CONTEXTS])


class Simulation(Rig):
    """A rig whose clock advances by the cost of each step. ``times``: the factor by which steps are slower than first
    estimated."""

    def __init__(self, times: float = 1.0, max_batch: int = 8) -> None:
        self.pace = PrefillPace(costs())
        super().__init__(pages=400, max_batch=max_batch, max_context=16384, prefill_chunk=CHUNK, pace=self.pace)
        self.real = costs(times)
        self.room: dict[Sequence, int] = {}
        self.done_s: dict[Sequence, float] = {}

    def ask(self, length: int, output: int, priority: int = 0) -> Sequence:
        (seq,) = self.add(length, priority=priority)
        self.room[seq] = output
        return seq

    def tick(self) -> float:
        """A step; the milliseconds it took."""
        plan = self.plan()
        if not plan.entries:
            return 0.0
        ms = self._ms(plan)
        self.commit(plan)
        self.now += ms / 1e3
        for entry in plan.entries:
            seq = entry.seq
            if entry.samples and seq.n_output >= self.room[seq]:
                self.done_s[seq] = self.now
                self.scheduler.finish(seq)
        return ms

    def _ms(self, plan: StepPlan) -> float:
        prompt_rows = sum(e.prefill for e in plan.entries)
        decodes = sum(e.samples for e in plan.entries)
        looked = sum(e.prefill * (e.seq.n_computed + e.prefill / 2) for e in plan.entries)
        context = looked / prompt_rows if prompt_rows else 0.0
        ms = self.real.ms(decodes + prompt_rows)
        if prompt_rows:
            ms += self.real.ms(prompt_rows, context) - self.real.ms(prompt_rows)
        rows = decodes + prompt_rows
        self.pace.observe(StepTimes(decodes, rows, 0, looked / rows, context, 0.0, ms, 0.0))
        return ms

    def time_of(self, *lengths: tuple[int, int]) -> float:
        """Seconds that requests of these prompt and output lengths take on an idle engine."""
        seqs = [self.ask(*each) for each in lengths]
        began = self.now
        while not all(seq in self.done_s for seq in seqs):
            self.tick()
        return self.now - began


@pytest.mark.parametrize("times", [1.0, 2.0])
def test_streams_keep_their_pace_during_a_long_prefill(times: float) -> None:
    alone_s = Simulation(times).time_of((3600, 1))
    sim = Simulation(times)
    for _ in range(4):
        sim.ask(50, 10_000)
    for _ in range(100):
        sim.tick()
    long, began, gaps = sim.ask(3600, 1), sim.now, []
    while long not in sim.done_s:
        gaps.append(sim.tick())
    assert sorted(gaps)[int(len(gaps) * 0.99) - 1] <= 90.0
    assert sim.done_s[long] - began <= 1.5 * alone_s


@pytest.mark.parametrize("length", [2, 90, 300, 500])
def test_short_requests_behind_a_long_one_take_three_times_as_long_plus_a_chunk(length: int) -> None:
    sim = Simulation()
    alone_s = sim.time_of((length, 8))
    sim.ask(8000, 1)
    for _ in range(6):
        for _ in range(4):
            chunk_s = sim.tick() / 1e3
        began = sim.now - chunk_s  # it arrived just after the last step started
        short = sim.ask(length, 8)
        while short not in sim.done_s:
            sim.tick()
        assert sim.now - began <= 3 * alone_s + chunk_s


def test_bug_the_attended_tokens_of_decodes_exclude_the_prompt() -> None:
    decodes, prompt = make_samples(make_request([1], n=4)), make_samples(make_request([1]))[0]
    for seq in decodes:
        seq.n_computed = 100
    prompt.n_computed = 4000
    plan = StepPlan([*(PlanEntry(seq, 0, 10, True) for seq in decodes), PlanEntry(prompt, 192, 0, False)])
    result = StepResult(0.0)
    _count_rows(plan, Proposals([*(TokenTree(1) for _ in decodes), None]), result)
    times = result.times
    assert (times.rows, times.prompt_rows, times.prompt_context, times.plain_context) == (196, 192, 4096.0, 100.0)


def test_a_higher_priority_gets_the_whole_chunk() -> None:
    rig = Rig(prefill_chunk=CHUNK, pages=200, max_context=10_000)
    (long,) = rig.add(4000)
    rig.step()
    (urgent,) = rig.add(1000, priority=5)
    while urgent.n_output == 0:
        before = long.n_computed
        plan = rig.step()
        assert long.n_computed == before or rig.entry(plan, urgent).samples


def test_the_nearer_deadline_goes_first_among_equals() -> None:
    rig = Rig(prefill_chunk=CHUNK, max_batch=1)
    rig.start(5)
    (patient,), (pressed,) = rig.add(50), rig.add(50)
    rig.scheduler.finish(pressed)
    (pressed,) = rig.add(50, deadline_s=2.0)
    rig.scheduler.finish(rig.scheduler.running[0])
    assert rig.plan().admitted == [pressed]
    assert patient.phase is SequencePhase.WAITING


def test_the_first_in_the_queue_gets_a_third_of_every_chunk_however_many_short_ones_arrive() -> None:
    rig = Rig(prefill_chunk=CHUNK, pages=400, max_context=16_000, max_batch=64)
    (long,) = rig.add(8000)
    steps = 0
    while long.n_output == 0:
        for _ in range(6):
            rig.add(90)
        for seq in [seq for seq in rig.scheduler.running if seq.n_output]:
            rig.scheduler.finish(seq)
        rig.step()
        steps += 1
        for seq in queued(rig.scheduler)[20:]:
            rig.scheduler.finish(seq)
    assert steps <= 1 + 8000 // (CHUNK // 3)


@pytest.mark.parametrize("seed", range(8))
def test_no_prompt_starves_under_a_flood(seed: int) -> None:
    """Prompts have at least 1 / (1 + others) of the time, and the first in line a third of that."""
    rng = random.Random(seed)
    sim = Simulation(max_batch=6)
    alone_s = Simulation(max_batch=6).time_of((2000, 1))
    long, began = sim.ask(2000, 1), sim.now
    while long not in sim.done_s:
        if len(queued(sim.scheduler)) < 12 and rng.random() < 0.5:
            sim.ask(rng.randint(1, 60), rng.randint(1, 12))
        sim.tick()
    assert sim.now - began <= 3 * (1 + 6) * alone_s


def test_a_long_prompt_is_preempted_for_a_short_one_and_continues_where_it_was() -> None:
    rig = Rig(prefill_chunk=CHUNK, pages=400, max_context=16_000, max_batch=2)
    (first,), (second,) = rig.add(4000), rig.add(3000)
    for _ in range(4):
        rig.step()
    assert second.n_computed > 64
    read = second.n_computed
    (short,) = rig.add(20)
    plan = rig.step()
    assert (plan.paused, plan.admitted, plan.preempted) == ([second], [short], [])
    assert short.n_output == 1
    assert first.phase is SequencePhase.RUNNING
    rig.scheduler.finish(short)
    plan = rig.until(lambda: second.phase is SequencePhase.RUNNING)
    assert plan.admitted == [second]
    assert second.n_computed >= read // 64 * 64
    assert (second.pauses, second.preemptions, first.pauses, first.preemptions) == (1, 0, 0, 0)


def test_no_prompt_is_preempted_if_none_of_its_pages_would_remain() -> None:
    rig = Rig(prefill_chunk=CHUNK, pages=400, max_context=16_000, max_batch=2, prefix_cache=False)
    for _ in range(2):
        rig.add(3000)
    for _ in range(4):
        rig.step()
    rig.add(20)
    assert rig.step().paused == []
