"""The drafting stage in a running engine: which drafters run, how deep, and what the trace records."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draft.protocol import DraftTask, ModelBasedDrafter
from specdec.config import SpeculationConfig
from specdec.control.estimates.costs import CostTable
from specdec.control.inputs import Match, Outcome, Plan, StepInputs
from specdec.control.params import DEFAULT_PARAMS as PARAMS
from specdec.control.params import ControlParams
from specdec.control.trace import replay_file
from specdec.core.sequence import FIXED_DEPTH, FIXED_NODES, Sequence
from specdec.core.tree import TokenTree
from specdec.core.types import Request, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams
from specdec.engine.engine import Engine
from specdec.engine.profile_costs import StepCosts
from specdec.engine.propose import PAUSE_STEPS
from specdec.engine.speculation import EngineParts
from tests.engine.tiny_engine import drain, run_all, tiny_engine, tiny_parts, tokens_of

AUTO, ON, OFF = SpeculationMode.AUTO, SpeculationMode.ON, SpeculationMode.OFF
ROWS = [1, 96]


class Recorder(ModelBasedDrafter):
    """Proposes one chain of token 3 as deep as it may, and keeps the tasks it was given."""

    def __init__(self, name: str, model_based: bool, pending: int = 0, tail: int | None = None) -> None:
        self.name, self.model_based, self._pending = name, model_based, pending
        self._tail = pending if tail is None else tail
        self.tasks: list[DraftTask] = []
        self.batches: list[int] = []
        self.outputs: list[int] = []  # per task, tokens its sequence had emitted
        self.matched: list[
            tuple[Match, int]
        ] = []  # per call of `match`, the answer and the tokens of the first sequence
        self.match_at = lambda tokens: Match.STRONG  # by the number of tokens

    def warm_up(self, rows: int) -> None: ...

    def pending_prefill(self, sequence: Sequence) -> int:
        return self._pending

    def tail_prefill(self, sequence: Sequence) -> int:
        return self._tail

    def match(self, sequences: Seq[Sequence]) -> list[Match]:
        found = [self.match_at(len(sequence.tokens)) for sequence in sequences]
        self.matched.append((found[0], len(sequences[0].tokens)))
        return found

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        self.tasks += tasks
        self.batches.append(len(tasks))
        self.outputs += [task.sequence.n_output for task in tasks]
        trees = []
        for task in tasks:
            tree, node = TokenTree(task.sequence.tokens[-1]), 0
            while node >= 0 and task.max_nodes:
                node = task.add(tree, node, 3, 0.9)
            trees.append(tree)
        return trees


def engine_with(
    *drafters: Recorder, level_ms: float = 1.0, row_ms: float = 0.01, control_params: ControlParams = PARAMS,
    parts: EngineParts | None = None, **speculation: Any,
) -> Engine:  # fmt: skip
    """The target's forward is believed to take 10 ms and ``row_ms`` a row, a level ``level_ms``."""
    verify = CostTable(ROWS, [0], [[10.0, 10.0 + 95 * row_ms]]).as_dict()
    level = CostTable(ROWS, [0], [[level_ms, level_ms]]).as_dict()
    costs = StepCosts(verify, {drafter.name: level for drafter in drafters if drafter.model_based})
    parts = parts or tiny_parts()
    config: SpeculationConfig = parts.config.speculation.model_copy(
        update={"max_nodes": 31, "max_depth": 12} | speculation
    )
    return tiny_engine(
        replace(parts, drafters=list(drafters), costs=costs, control_params=control_params), speculation=config
    )


def request(name: str, mode: SpeculationMode, tokens: int = 30, prompt: int = 9, **wishes: Any) -> Request:
    return Request(
        name,
        tuple(range(7, 7 + prompt)),
        SamplingParams(temperature=0.0),
        StoppingParams(max_tokens=tokens, ignore_eos=True),
        speculation=SpeculationParams(mode, **wishes),
    )


def drafting_tasks(drafter: Recorder) -> list[DraftTask]:
    return [task for task in drafter.tasks if task.max_nodes]


def test_mode_off_runs_no_drafter_also_in_a_batch() -> None:
    free, model_based = Recorder("free", False), Recorder("model-based", True)
    run_all(engine_with(free, model_based), [request("on", ON), request("off", OFF)])
    assert {task.sequence.request.request_id for task in free.tasks + model_based.tasks} == {"on"}


def test_mode_on_drafts_the_fixed_caps_without_floors() -> None:
    drafter = Recorder("model-based", True)
    run_all(engine_with(drafter, level_ms=1e6), [request("r", ON)])
    tasks = drafting_tasks(drafter)
    assert len(tasks) > 3
    assert {task.max_depth for task in tasks} == {FIXED_DEPTH}
    assert max(task.max_nodes for task in tasks) == FIXED_NODES
    assert {(task.floor, task.level_floor) for task in tasks} == {(-math.inf, -math.inf)}


@pytest.mark.parametrize("mode", [ON, AUTO])
def test_caps_of_a_request_override_the_defaults(mode: SpeculationMode) -> None:
    drafter = Recorder("free", False)
    run_all(engine_with(drafter), [request("r", mode, max_nodes=3, max_depth=2, width=1)])
    tasks = drafting_tasks(drafter)
    assert {(task.max_depth, task.width) for task in tasks} == {(2, 1)}
    assert max(task.max_nodes for task in tasks) == 3


@pytest.mark.parametrize("mode", [ON, AUTO])
def test_drafts_are_no_longer_than_the_remaining_output(mode: SpeculationMode) -> None:
    drafter = Recorder("free", False)
    run_all(engine_with(drafter), [request("r", mode, tokens=4)])
    assert drafting_tasks(drafter)
    for task, outputs in zip(drafter.tasks, drafter.outputs, strict=True):
        assert task.max_nodes <= max(0, 4 - outputs - 1)


def test_a_drafter_more_expensive_than_the_target_does_not_run() -> None:
    drafter = Recorder("model-based", True)
    run_all(
        engine_with(drafter, level_ms=60.0, control_params=replace(PARAMS, drift_chance=0.0125)),
        [request("r", AUTO, tokens=100)],
    )
    assert drafting_tasks(drafter) == []


def test_where_no_drafter_pays_most_steps_need_no_decision() -> None:
    engine = engine_with(Recorder("model-based", True), level_ms=60.0)
    engine.submit(request("first", AUTO, tokens=60))
    while len(engine.trace(1000)) < 12:
        engine.step()
    engine.submit(request("second", AUTO, tokens=30))
    drain(engine)
    decided = [step.control_ms > 0 for step in engine.trace(1000)]
    alone = decided[1:12]  # the first step ends the prompt
    assert sum(alone) in (1, 2)
    joined = next(i for i, step in enumerate(engine.trace(1000)) if step.sequences == 2)
    assert decided[joined]  # other sequences, another decision
    gaps = "".join("d" if made else "r" for made in decided).split("d")
    assert max(map(len, gaps)) == 2 * PARAMS.rest_steps[0]


def test_a_replay_counts_the_steps_between_decisions(tmp_path: Path) -> None:
    """By a clock that is independent of the machine's load: each reading is 5 ms after the last."""
    path, params = tmp_path / "t.jsonl", replace(PARAMS, drift_chance=0.05)
    clock = itertools.count(0.0, 0.005).__next__
    parts = replace(tiny_parts(), clock=clock)
    engine = engine_with(Recorder("model-based", True), parts=parts, control_params=params, trace_file=path)
    engine._speculation.drafting._clock = clock
    run_all(engine, [request(f"r{i}", AUTO, tokens=100) for i in range(3)])
    engine.close()
    report = replay_file(path)
    assert report.steps > 8
    assert report.differences == []
    assert '"rested":8' in path.read_text()
    path.write_text(path.read_text().replace('"rested":8', '"rested":9999'))
    assert replay_file(path).differences  # a drafter that was idle for so long is tried again


def test_the_time_of_learning_counts_as_time_of_drafting() -> None:
    engine = engine_with(Recorder("free", False))
    controller, outcomes = engine._speculation.drafting.controller, []

    def observe(step: StepInputs, plan: Plan, outcome: Outcome) -> None:
        outcomes.append(outcome)
        time.sleep(0.02)

    controller.observe = observe  # type: ignore[method-assign]
    run_all(engine, [request("r", AUTO, tokens=6)])
    assert len(outcomes) > 1
    assert all(outcome.draft_ms >= 20.0 for outcome in outcomes[1:])


def test_a_probe_is_three_levels_deep_and_has_no_floor() -> None:
    """It gains nothing, is soon disabled and probed again: an estimate that fell too low must be corrected."""
    drafter, ticks = Recorder("model-based", True), itertools.count()
    parts = replace(tiny_parts(), clock=lambda: next(ticks) * 1e-3)  # 1 ms from each look to the next
    engine = engine_with(drafter, control_params=replace(PARAMS, probe_every=4, drift_chance=0.025), parts=parts)
    run_all(engine, [request("r", AUTO, tokens=100)])
    probes = [task for task in drafting_tasks(drafter) if task.max_depth == 3]
    others = [task for task in drafting_tasks(drafter) if task.max_depth != 3]
    assert probes
    assert others
    assert {task.floor for task in probes} == {-math.inf}
    assert min(task.floor for task in others) > -math.inf


def test_the_first_token_waits_for_no_expensive_drafter() -> None:
    """Only in the step that ends the prompt, and not if drafting is forced."""
    for mode in (AUTO, ON):
        drafter = Recorder("model-based", True)
        engine = engine_with(drafter, level_ms=1e-3)
        engine.submit(request("r", mode, prompt=100))
        engine.step()
        assert drafting_tasks(drafter) == []
        engine.step()
        assert bool(drafting_tasks(drafter)) is (mode is ON)
        drain(engine)
        assert drafting_tasks(drafter)


def test_a_long_text_is_observed_in_chunks() -> None:
    """With another request in the batch no step takes longer than two plain ones. Alone it may take longer."""
    drafter = Recorder("model-based", True, pending=1000)
    engine = engine_with(drafter, level_ms=0.1)
    run_all(engine, [request("a", AUTO), request("b", AUTO)])
    assert drafting_tasks(drafter) == []
    together = [task.prefill for task in drafter.tasks]
    engine.submit(request("c", AUTO))
    drain(engine)
    alone = [task.prefill for task in drafter.tasks[len(together) :]]
    assert max(together) < max(alone) == 512
    parts = [part for step in engine.trace(1000) for part in step.drafters]
    assert {part.decision for part in parts} == {"read"}
    assert sum(part.read for part in parts) == sum(task.prefill for task in drafter.tasks)


@pytest.mark.parametrize(
    ("mode", "gain", "tail", "tails"),
    [(AUTO, 0.1, 10, {True}), (AUTO, 100.0, 10, {False}), (ON, 0.1, 10, {False}), (AUTO, 0.1, 390, {False})],
)
def test_the_start_of_a_text_is_left_out_until_the_whole_would_have_paid(
    mode: SpeculationMode, gain: float, tail: int, tails: set[bool], tmp_path: Path
) -> None:
    """400 tokens take 5 ms more than the first level, and 10 nothing. Mode ON reads the whole."""
    drafter, path = Recorder("model-based", True, pending=400, tail=tail), tmp_path / "t.jsonl"
    params = replace(PARAMS, whole_text_gain=gain)
    engine = engine_with(drafter, level_ms=5.0, control_params=params, trace_file=path)
    run_all(engine, [request("r", mode)])
    engine.close()
    assert {task.tail for task in drafting_tasks(drafter)} == tails
    parts = [part for step in engine.trace(1000) for part in step.drafters if part.decision != "off"]
    assert {part.read for part in parts} == {tail if True in tails else 400}
    assert replay_file(path).differences == []


def test_free_drafters_observe_a_prompt_during_prefill() -> None:
    drafter = Recorder("free", False)
    engine = engine_with(drafter)
    engine.submit(request("r", AUTO, prompt=150))
    engine.step()
    assert drafter.tasks == []
    assert drafter.matched == [(Match.STRONG, 150)]
    assert engine._speculation.drafting._rested == 0  # nothing was sampled


def test_a_step_without_a_match_needs_no_decision() -> None:
    drafter = Recorder("free", False)
    drafter.match_at = lambda tokens: Match.NONE if tokens % 5 else Match.STRONG
    engine = engine_with(drafter, control_params=replace(PARAMS, min_weighed_share=1e9))
    events = run_all(engine, [request("r", AUTO, tokens=60), request("other", OFF, tokens=60)])
    assert len(tokens_of(events, "r")) == 60
    tasks = drafting_tasks(drafter)
    assert tasks
    assert all(tokens % 5 == 0 for tokens in (9 + outputs for outputs in drafter.outputs))
    decided = [step for step in engine.trace(1000) if step.control_ms > 0]
    assert len(decided) == len(drafter.batches) == sum(match is Match.STRONG for match, _ in drafter.matched)
    assert len(drafter.matched) > 2 * len(decided)


def test_a_match_ends_a_rest() -> None:
    """The model-based drafter never pays, so steps without a match rest."""
    drafter = Recorder("free", False)
    drafter.match_at = lambda tokens: Match.STRONG if tokens == 40 else Match.NONE
    engine = engine_with(drafter, Recorder("costly", True), level_ms=1e6)
    controller, decided = engine._speculation.drafting.controller, []
    decide = controller.decide

    def watch(step: StepInputs) -> Plan:
        decided.append(step.sequences[0].emitted + 9)
        return decide(step)

    controller.decide = watch  # type: ignore[method-assign]
    run_all(engine, [request("r", AUTO, tokens=60)])
    assert drafter.outputs == [40 - 9]
    assert len(set(decided)) < 60 / PARAMS.rest_steps[0] + 3


@pytest.mark.parametrize(
    ("mode", "match", "anywhere"),
    [(AUTO, Match.WEAK, False), (AUTO, Match.STRONG, True), (ON, Match.WEAK, True)],
)
def test_where_proposals_are_costly_only_first_tokens_and_mode_on_draft_after_a_single_token(
    mode: SpeculationMode, match: Match, anywhere: bool
) -> None:
    drafter = Recorder("free", False)
    drafter.match_at = lambda tokens: match
    engine = engine_with(drafter)
    controller = engine._speculation.controller
    controller.estimates.least_match = Match.STRONG
    controller.observe = lambda *step: None  # type: ignore[method-assign]
    run_all(engine, [request("r", mode), request("other", AUTO)])
    tried: dict[str, set[int]] = {"r": set(), "other": set()}
    for task, outputs in zip(drafter.tasks, drafter.outputs, strict=True):
        tried[task.sequence.request.request_id].add(outputs)
    assert all(0 in outputs for outputs in tried.values())
    assert (len(tried["r"]) > 1) is anywhere
    assert (len(tried["other"]) > 1) is (match is Match.STRONG)


def test_proposals_that_were_costly_are_measured_again() -> None:
    """Every match is of a single token. The drafter takes no time any more."""
    parts = replace(tiny_parts(), clock=lambda: 0.0)
    drafter = Recorder("free", False)
    drafter.match_at = lambda tokens: Match.WEAK
    engine = engine_with(drafter, parts=parts)
    engine._speculation.drafting._clock = parts.clock
    estimates = engine._speculation.controller.estimates
    estimates.least_match, estimates.lookup_ms = Match.STRONG, 1.0  # of 10
    for at in range(12):
        run_all(engine, [request(f"r{at}", AUTO, tokens=8)])
    assert max(drafter.outputs) > 0


def test_a_rest_that_no_match_can_end_looks_for_none() -> None:
    drafter = Recorder("free", False)
    engine = engine_with(drafter)
    engine._speculation.controller.estimates.lookup_ms = 1e6
    run_all(engine, [request("r", AUTO, tokens=60)])
    assert len(drafter.matched) < 60 / PARAMS.rest_steps[0] + 3


def test_reading_new_text_is_no_price_of_a_proposal() -> None:
    """A long text that lookup drafters read once must not end their proposals."""
    now = [0.0]

    def read_text(tokens: int) -> Match:
        now[0] += 1.0
        return Match.STRONG

    drafter, parts = Recorder("free", False), replace(tiny_parts(), clock=lambda: now[0])
    drafter.match_at = read_text
    engine = engine_with(drafter, parts=parts)
    engine._speculation.drafting._clock = parts.clock
    run_all(engine, [request("r", AUTO)])
    assert len(drafting_tasks(drafter)) > 3
    assert engine._speculation.controller.estimates.lookups_ms(1) < 10.0
    first = next(step for step in engine.trace(99) if step.drafters)
    assert (first.predicted_draft_ms, first.realised_draft_ms) == (1000.0, 1000.0)


def test_drafts_return_after_a_fault_of_their_stage() -> None:
    drafter = Recorder("free", False)
    engine = engine_with(drafter)
    decide, controller = engine._speculation.controller.decide, engine._speculation.drafting.controller
    faults = iter([True])

    def fail_once(step: StepInputs) -> Plan:
        if next(faults, False):
            raise RuntimeError("decide")
        return decide(step)

    controller.decide = fail_once  # type: ignore[method-assign]
    run_all(engine, [request("r", AUTO, tokens=100)])
    assert PAUSE_STEPS <= min(drafter.outputs) < PAUSE_STEPS + 2


def test_a_step_without_room_for_a_draft_needs_no_decision() -> None:
    engine = engine_with(Recorder("free", False))
    run_all(engine, [request("r", AUTO, tokens=1)])
    assert [step.control_ms for step in engine.trace(10)] == [0.0]


def test_drafters_propose_for_all_sequences_together() -> None:
    drafter = Recorder("model-based", True)
    run_all(engine_with(drafter, level_ms=0.01), [request(f"r{i}", AUTO) for i in range(4)])
    assert max(drafter.batches) == 4


def test_the_trace_records_the_draft_requests() -> None:
    free, model_based = Recorder("free", False), Recorder("model-based", True)
    engine = engine_with(free, model_based, level_ms=200.0)
    events = run_all(engine, [request("auto", AUTO), request("off", OFF)])
    steps = engine.trace(1000)
    assert sum(step.realised_tokens for step in steps) == len(tokens_of(events, "auto")) + len(tokens_of(events, "off"))
    assert {part.decision for step in steps for part in step.drafters if part.name == "free"} <= {"free", "off"}
    assert sum(d.sequences for step in steps for d in step.drafters if d.name == "free") == len(drafting_tasks(free))
    both = [step for step in steps if step.sequences == 2]
    assert both
    for step in steps:
        assert step.rows == step.prefill_rows + step.sequences + step.budget
        assert all(drafter.sequences <= 1 for drafter in step.drafters)
        assert step.predicted_verify_ms > 0 or not step.drafters


def test_bug_a_drafter_that_is_not_worth_its_time_was_missing_from_the_trace() -> None:
    free, model_based = Recorder("free", False), Recorder("model-based", True)
    engine = engine_with(free, model_based, level_ms=1e6)
    run_all(engine, [request("auto", AUTO), request("off", OFF)])
    parts = [drafter for step in engine.trace(1000) for drafter in step.drafters if drafter.name == "model-based"]
    assert {drafter.decision for drafter in parts} == {"off"}
    assert {(drafter.sequences, drafter.proposed, drafter.verified, drafter.ms) for drafter in parts} == {(0, 0, 0, 0)}


def test_a_step_without_a_decision_has_no_prediction() -> None:
    engine = engine_with(Recorder("free", False))
    run_all(engine, [request("off", OFF)])
    assert all(math.isnan(step.predicted_ms) for step in engine.trace(1000))


def test_the_trace_predicts_the_reading_of_texts_and_lookups() -> None:
    def predicted(*drafters: Recorder) -> float:
        engine = engine_with(*drafters, level_ms=2.0)
        engine._speculation.controller.estimates.lookup_ms = 0.5
        engine._speculation.drafting._clock = lambda: 0.0  # looking for matches takes no time
        run_all(engine, [request("r", ON, tokens=4)])
        return next(step.predicted_draft_ms for step in engine.trace(9) if step.drafters)

    short, long = (predicted(Recorder("model-based", True, pending=pending)) for pending in (0, 2000))
    assert 0 < short < long - 2
    assert predicted(Recorder("free", False), Recorder("model-based", True)) == pytest.approx(short + 0.5)


def test_forced_drafting_is_marked_in_the_trace() -> None:
    engine = engine_with(Recorder("model-based", True))
    run_all(engine, [request("r", ON)])
    assert {drafter.decision for step in engine.trace(1000) for drafter in step.drafters} == {"forced"}


def test_empty_trees_of_drafters_leave_plain_decode() -> None:
    silent = Recorder("free", False)
    silent.propose = lambda tasks: [TokenTree(task.sequence.tokens[-1]) for task in tasks]  # type: ignore[method-assign]
    engine = engine_with(silent)
    events = run_all(engine, [request("r", AUTO)])
    assert tokens_of(events, "r") == tokens_of(run_all(tiny_engine(), [request("r", OFF)]), "r")
    assert all(step.budget == 0 for step in engine.trace(1000))
