"""Runs the controller alone over a recorded trace: the same inputs must give the same decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from specdec.control.controller import Controller
from specdec.control.decided import Decided
from specdec.control.merge import merge
from specdec.control.outcome import DraftWork, Outcome
from specdec.control.sequence_control import SequenceControl
from specdec.control.step_record import StepRecord, rebuilt_tree, rebuilt_turn
from specdec.control.trace_file import read_trace
from specdec.control.turn import Turn
from specdec.errors import ConfigError
from specdec.tree import TokenTree


@dataclass(slots=True)
class ReplayReport:
    """How many steps were decided again, and every decision that came out otherwise."""

    steps: int = 0
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Owed:
    """A step that was decided and not yet learned from."""

    outcome: Outcome
    decisions: dict[str, list[str]]
    decided: Decided


def replay_file(path: Path) -> ReplayReport:
    """Decide every step of the trace at ``path`` again.

    Raises:
        ConfigError: it is no trace, or one without the values a replay needs.
    """
    header, steps = read_trace(path)
    report = ReplayReport()
    controls: dict[int, SequenceControl] = {}
    owed: _Owed | None = None
    try:
        controller = Controller.from_dict(header)
        for step in steps:
            if step.replay:
                record = StepRecord(**cast(dict[str, Any], step.replay))
                if not record.late:
                    _settle(controller, owed)
                    owed = None
                after = _decide_again(controller, record, controls, step.step, report)
                _settle(controller, owed)
                owed = after
        _settle(controller, owed)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(f"{path}: is damaged, or was written by another version ({error!r})") from None
    if not report.steps:
        raise ConfigError(f"{path}: holds nothing to replay; record requests in mode AUTO with --trace-file")
    return report


def _settle(controller: Controller, owed: _Owed | None) -> None:
    """Learn from a step, if one is still to be learned from."""
    if owed is not None:
        controller.observe(owed.outcome, owed.decisions, owed.decided)


def _decide_again(
    controller: Controller, record: StepRecord, controls: dict[int, SequenceControl], number: int, report: ReplayReport
) -> _Owed:
    """Returns what is to be learned from the step."""
    report.steps += 1
    turns = [rebuilt_turn(controller, values, controls) for values in record.turns]
    controller.begin(turns, record.prefill_rows)
    work = _decide(controller, record, turns, number, report)
    trees = [
        merge([TokenTree(pending), *(tree for done in work.values() if (tree := done.trees[i]) is not None)])
        for i, pending in enumerate(record.pending)
    ]
    choice = controller.choose(trees, sum(done.ms for done in work.values()))
    if choice.kept != record.kept:
        report.differences.append(f"step {number}: nodes verified {choice.kept}, recorded {record.kept}")
    outcome = Outcome(record.tokens, record.rows, record.context, record.verify_ms, work, record.draft_ms)
    return _Owed(outcome, record.decisions, controller.decided)


def _decide(
    controller: Controller, record: StepRecord, turns: list[Turn], number: int, report: ReplayReport
) -> dict[str, DraftWork]:
    free = controller.free_gate()
    if free != record.free:
        report.differences.append(f"step {number}: free drafters asked {free}, recorded {record.free}")
    work: dict[str, DraftWork] = {}
    for name in controller.order:
        if name in record.decisions:
            others: list[list[TokenTree]] = [
                [tree for done in work.values() if (tree := done.trees[i]) is not None] for i in range(len(turns))
            ]
            recorded = record.decisions[name]
            decided = controller.gate(name, others, [decision != "" for decision in recorded])
            # A turn that was not eligible, and one that was but may not draft now, both read ``.
            if decided != recorded:
                report.differences.append(f"step {number}: {name} {decided}, recorded {recorded}")
        if name in record.trees:
            trees = [
                None if nodes is None else rebuilt_tree(controller, name, turn, pending, nodes)
                for turn, pending, nodes in zip(turns, record.pending, record.trees[name], strict=True)
            ]
            levels, ms = record.work[name]
            work[name] = DraftWork(trees, levels, ms)
    return work
