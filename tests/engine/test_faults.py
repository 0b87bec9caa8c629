"""Drafters that break in a running engine: every request ends with the tokens of plain decode."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from draft.manager import MAX_FAULTS, STALL_MS, SUSPENSION_S
from draft.protocol import DraftTask, ModelBasedDrafter
from specdec.config import SpeculationConfig
from specdec.control.trace import replay_file
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.core.types import Request, RequestEvent, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams
from specdec.engine.engine import Engine
from tests.draft.scripted_drafter import Make
from tests.draft.test_manager import GARBAGE, HARMLESS, SLIPS_THROUGH, Clock
from tests.engine.tiny_engine import drain, failures, finish_of, run_all, tiny_engine, tiny_parts, tokens_of

LENGTH, COUNT = 18, 4
AUTO, ON, OFF = SpeculationMode.AUTO, SpeculationMode.ON, SpeculationMode.OFF


def requests(mode: SpeculationMode, drafters: tuple[str, ...] | None = None, first: int = 0) -> list[Request]:
    """Greedy and sampled ones, of one length."""
    return [
        Request(
            f"r{i}",
            tuple(range(5 + i, 25 + 3 * i)),
            SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i),
            StoppingParams(max_tokens=LENGTH, ignore_eos=True),
            speculation=SpeculationParams(mode, drafters),
        )
        for i in range(first, first + COUNT)
    ]


@functools.cache
def all_plain() -> dict[str, tuple[int, ...]]:
    """The answers of each request without drafting. They are generated before an engine has pages in use, because all
    engines share the pools of one decoder."""
    pending = [*requests(OFF), *requests(OFF, first=COUNT)]
    events = run_all(tiny_engine(), pending)
    return {request.request_id: tuple(tokens_of(events, request.request_id)) for request in pending}


def plain(name: str) -> tuple[int, ...]:
    """The answer to one of them."""
    return all_plain()[name]


class Truthful(ModelBasedDrafter):
    """Proposes the request's answer. ``breaks``: methods that raise; ``make``: what it proposes instead."""

    def __init__(self, name: str, model_based: bool = False, breaks: str = "", make: Make | None = None) -> None:
        self.name, self.model_based, self.breaks, self.make = name, model_based, breaks, make
        self.asked: list[str] = []
        self.ended: list[str] = []
        self.working = False

    def _called(self, method: str) -> None:
        if method == self.breaks and not self.working:
            raise RuntimeError(f"{self.name}: {method}")

    def begin(self, sequence: Sequence) -> None:
        self._called("begin")

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        self.asked += [task.sequence.request.request_id for task in tasks if task.max_nodes]
        self._called("propose")
        if self.make is not None and not self.working:
            return [self.make(task) for task in tasks]
        return [self._tree(task) for task in tasks]

    def _tree(self, task: DraftTask) -> TokenTree:
        tree, node = TokenTree(task.sequence.tokens[-1]), 0
        for token in plain(task.sequence.request.request_id)[task.sequence.n_output :]:
            node = task.add(tree, node, token, 0.9)
            if node < 0:
                break
        return tree

    def observe(self, sequence: Sequence, tokens: Seq[int]) -> None:
        self._called("observe")

    def rewind(self, sequence: Sequence) -> None:
        self._called("rewind")

    def end(self, sequence: Sequence) -> None:
        self.ended.append(sequence.request.request_id)
        self._called("end")

    def pending_prefill(self, sequence: Sequence) -> int:
        self._called("pending_prefill")
        return 1

    def warm_up(self, rows: int) -> None: ...


def engine_with(*drafters: Truthful, **speculation: Any) -> Engine:
    all_plain()
    parts = tiny_parts()
    config: SpeculationConfig = parts.config.speculation.model_copy(update=speculation)
    return timed(tiny_engine(dataclasses.replace(parts, drafters=list(drafters)), speculation=config))


def timed(engine: Engine) -> Engine:
    """Its forwards take 10 ms and nothing else takes any time: by the real clock, a tiny model's forward is as short as
    a hiccup of the machine, after which mode AUTO may well decide that asking a drafter does not pay."""
    now = 0.0
    start = engine._step._verifier.start

    def slow(*args: Any) -> Any:
        nonlocal now
        now += 0.01
        return start(*args)

    engine._step._verifier.start = slow  # type: ignore[method-assign,assignment]
    engine._step._clock = lambda: now
    return engine


def run(engine: Engine, mode: SpeculationMode, first: int = 0) -> list[RequestEvent]:
    """All requests together, the newest preempted on the way."""
    for request in requests(mode, first=first):
        engine.submit(request)
    events: list[RequestEvent] = []
    for _ in range(4):
        events += engine.step()
    engine.preempt_newest()
    return events + drain(engine)


def check_tokens(events: Seq[RequestEvent], first: int = 0) -> None:
    assert not failures(events)
    for i in range(first, first + COUNT):
        assert tuple(tokens_of(events, f"r{i}")) == plain(f"r{i}")


def accepted(events: Seq[RequestEvent], drafter: str) -> int:
    found = [finish_of(events, f"r{i}").stats.by_drafter.get(drafter) for i in range(COUNT)]
    return sum(stats.num_accepted_draft_tokens for stats in found if stats is not None)


@pytest.mark.parametrize("model_based", [False, True])
@pytest.mark.parametrize("mode", [AUTO, ON])
def test_working_drafters_are_used(mode: SpeculationMode, model_based: bool) -> None:
    """Without this the tests below would test nothing."""
    drafter = Truthful("d", model_based)
    events = run(engine_with(drafter), mode)
    check_tokens(events)
    assert accepted(events, "d") > COUNT * LENGTH // 2
    assert sorted(drafter.ended) == [f"r{i}" for i in range(COUNT)]
    assert set(drafter.asked) == {f"r{i}" for i in range(COUNT)}


@pytest.mark.parametrize("model_based", [False, True])
@pytest.mark.parametrize("mode", [AUTO, ON])
@pytest.mark.parametrize("method", ["begin", "propose", "observe", "rewind", "end", "pending_prefill"])
def test_a_drafter_that_raises_changes_no_token(method: str, mode: SpeculationMode, model_based: bool) -> None:
    bad, good = Truthful("bad", model_based, method), Truthful("good")
    events = run(engine_with(bad, good), mode)
    check_tokens(events)
    assert accepted(events, "good") > COUNT * LENGTH // 3
    assert sorted(bad.ended) == sorted(good.ended) == [f"r{i}" for i in range(COUNT)]
    if method in ("begin", "pending_prefill") and (model_based or method == "begin"):
        assert bad.asked == []
    if method in ("propose", "observe"):
        assert all(bad.asked.count(f"r{i}") <= 1 for i in range(COUNT))


@pytest.mark.parametrize("mode", [AUTO, ON])
@pytest.mark.parametrize("make", GARBAGE.values(), ids=GARBAGE)
def test_garbage_changes_no_token(make: Make, mode: SpeculationMode) -> None:
    bad, good = Truthful("bad", make=make), Truthful("good")
    events = run(engine_with(bad, good), mode)
    check_tokens(events)
    assert accepted(events, "good") > COUNT * LENGTH // 3
    assert all(bad.asked.count(f"r{i}") <= 1 for i in range(COUNT))
    assert accepted(events, "bad") == 0


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("make", HARMLESS.values(), ids=HARMLESS)
def test_odd_trees_change_no_token(make: Make, alone: bool) -> None:
    drafters = [Truthful("odd", make=make)] + ([] if alone else [Truthful("good")])
    check_tokens(run(engine_with(*drafters), AUTO))


def truly(make: Make) -> Make:
    """The tree with the right first token, so that observations of its first node reach its second."""

    def made(task: DraftTask) -> TokenTree:
        tree, sequence = make(task), task.sequence
        tree.tokens[1] = plain(sequence.request.request_id)[sequence.n_output]
        return tree

    return made


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("make", SLIPS_THROUGH.values(), ids=SLIPS_THROUGH)
def test_bug_undetected_garbage_changes_no_token(make: Make, alone: bool) -> None:
    drafters = [Truthful("bad", make=truly(make))] + ([] if alone else [Truthful("good")])
    check_tokens(run(engine_with(*drafters), ON if alone else AUTO))


@pytest.mark.parametrize("model_based", [False, True])
@pytest.mark.parametrize("mode", [AUTO, ON])
def test_a_drafter_that_stalls_runs_once_per_request(mode: SpeculationMode, model_based: bool) -> None:
    clock = Clock()
    slow = Truthful("slow", model_based)
    engine = engine_with(slow)
    engine._speculation.manager._clock = clock
    tree = slow._tree

    def stall(task: DraftTask) -> TokenTree:
        clock.now += 1.1 * STALL_MS / 1e3
        return tree(task)

    slow.make = stall
    events = run(engine, mode)
    check_tokens(events)
    assert 0 < len(slow.asked) <= COUNT
    assert len(set(slow.asked)) == len(slow.asked)


def test_three_faults_suspend_a_drafter_for_all_requests_until_it_is_trusted_again() -> None:
    clock = Clock()
    bad, good = Truthful("bad", breaks="propose"), Truthful("good")
    engine = engine_with(bad, good)
    engine._speculation.manager._clock = clock
    for i, request in enumerate(requests(ON)):
        events = run_all(engine, [request])
        assert tuple(tokens_of(events, request.request_id)) == plain(request.request_id)
        assert len(bad.asked) == min(i + 1, MAX_FAULTS)  # the fourth request is spared
    bad.working = True
    check_tokens(run(engine, ON, first=COUNT), first=COUNT)
    assert len(bad.asked) == MAX_FAULTS
    clock.now += SUSPENSION_S
    events = run(engine, ON)
    check_tokens(events)
    assert accepted(events, "bad") > COUNT * LENGTH // 2


def test_a_fault_for_one_request_keeps_the_drafter_of_others() -> None:
    picky = Truthful("picky")

    def make(task: DraftTask) -> TokenTree:
        return TokenTree(-1) if task.sequence.request.request_id == "r2" else picky._tree(task)

    picky.make = make
    events = run(engine_with(picky), ON)
    check_tokens(events)
    assert picky.asked.count("r2") == 1
    for i in (0, 1, 3):
        assert finish_of(events, f"r{i}").stats.num_accepted_draft_tokens > LENGTH // 2


def test_a_run_with_faults_replays(tmp_path: Any) -> None:
    path = tmp_path / "t.jsonl"
    bad, good = Truthful("bad", model_based=True, breaks="observe"), Truthful("good")
    engine = engine_with(bad, Truthful("worse", model_based=True, make=GARBAGE["cycle"]), good, trace_file=path)
    check_tokens(run(engine, AUTO))
    engine.close()
    report = replay_file(path)
    assert report.steps >= 3
    assert report.differences == []


def test_all_drafters_broken_is_plain_decode() -> None:
    drafters = [Truthful(f"d{i}", model_based=i % 2 == 0, breaks="propose") for i in range(4)]
    events = run(engine_with(*drafters), AUTO)
    check_tokens(events)
    assert all(finish_of(events, f"r{i}").stats.num_draft_tokens == 0 for i in range(COUNT))
