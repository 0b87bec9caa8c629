"""Thousands of random schedules against a fake engine that checks every promise after every step."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.scheduler.fake_engine import FakeEngine

SALTS = ("", "alice", "bob")


class ScheduleMachine(RuleBasedStateMachine):
    """Hypothesis chooses the events; the fake engine checks them; at the end everything must finish."""

    @initialize(
        seed=st.integers(0, 1 << 32),
        pages=st.integers(3, 14),
        prefix_cache=st.sampled_from([True, True, True, False]),
        max_batch=st.integers(1, 5),
        max_step_rows=st.integers(5, 90),
        prefill_chunk=st.integers(1, 90),
        max_queued=st.integers(0, 6),
    )
    def build(self, seed: int, pages: int, prefix_cache: bool, **limits: int) -> None:
        self.engine = FakeEngine(random.Random(seed), pages, prefix_cache, **limits)

    @rule(
        length=st.one_of(st.integers(1, 400), st.sampled_from([63, 64, 65, 128, 129, 192, 193])),
        text=st.integers(0, 2),
        salt=st.sampled_from(SALTS),
        priority=st.sampled_from([0, 0, 0, -1, 2]),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        room=st.integers(0, 150),
    )
    def add(self, length: int, text: int, salt: str, priority: int, n: int, room: int) -> None:
        self.engine.add(length, text, salt, priority, n, room)

    @rule(steps=st.integers(1, 30), most=st.sampled_from([0, 1, 7, 63]))
    def step(self, steps: int, most: int) -> None:
        for _ in range(steps):
            self.engine.step(most)
            self.engine.check()

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.finish(self.engine.live[data.draw(st.integers(0, len(self.engine.live) - 1))])

    @precondition(lambda self: self.engine.live)
    @rule(most=st.integers(0, 20), retry=st.booleans())
    def forward_fails(self, most: int, retry: bool) -> None:
        self.engine.broken_step(most, retry)

    @rule()
    def budget_fails(self) -> None:
        self.engine.broken_want()

    @rule()
    def flush(self) -> None:
        self.engine.kv.flush()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()


TestSchedules = ScheduleMachine.TestCase
TestSchedules.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def _random_schedule(seed: int) -> dict[str, int]:
    """One schedule of about 60 events. Returns what occurred, to show that the schedules cover enough."""
    rng = random.Random(seed)
    engine = FakeEngine(
        rng,
        rng.randint(3, 10),
        rng.random() < 0.85,
        max_batch=rng.randint(1, 5),
        max_step_rows=rng.randint(5, 90),
        prefill_chunk=rng.randint(1, 90),
        max_queued=rng.randint(0, 6),
    )
    met = {"preemptions": 0, "hits": 0, "refused": 0}
    seen = []
    for _ in range(60):
        event = rng.random()
        if event < 0.2:
            length = rng.choice([rng.randint(1, 300), 64, 65, 129])
            n = rng.choice([1, 1, 2, 4])
            taken = engine.add(
                length, rng.randint(0, 2), rng.choice(SALTS), rng.choice([0, 0, 1]), n, rng.randint(0, 120)
            )
            met["refused"] += not taken
            seen += engine.live[-n:] if taken else []
        elif event < 0.25 and engine.live:
            engine.finish(rng.choice(engine.live))
        elif event < 0.28:
            engine.broken_step(4, rng.random() < 0.5)
        elif event < 0.3:
            engine.broken_want()
        else:
            engine.step(rng.choice([0, 3, 20]))
        engine.check()
    engine.drain()
    met["preemptions"] = sum(seq.preemptions for seq in seen)
    met["hits"] = sum(seq.cached_tokens > 0 for seq in seen)
    return met


def _check_schedules(seeds: range) -> None:
    met = [_random_schedule(seed) for seed in seeds]
    for what in ("preemptions", "hits", "refused"):
        assert sum(m[what] > 0 for m in met) > len(seeds) // 20, f"too few schedules met {what}"


def test_random_schedules() -> None:
    _check_schedules(range(300))


@pytest.mark.slow
def test_thousands_of_random_schedules() -> None:
    _check_schedules(range(300, 5000))
