"""The decision trace: a step as plain values, in memory and on disk, and its replay."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from specdec.control.controller import Controller, Decided
from specdec.control.state import DraftWork, Outcome, SequenceControl, Turn
from specdec.control.tree_budget import merge
from specdec.errors import ConfigError
from specdec.tree import TokenTree
from specdec.types import DrafterTrace, StepTrace

Nodes = list[tuple[int, int, int]]  # (parent, token, cell) of each draft node


@dataclass(slots=True)
class StepRecord:
    """turns: fields of `Turn`, its control as (key, bucket). free: per turn whether the free drafters were asked.
    decisions: by costly drafter. trees: by drafter, per turn the draft nodes, None where not asked. work: by drafter
    (levels, milliseconds). kept: per turn the nodes verified. late: the controller learned from the recorded step
    before this one only after it had decided this one."""

    turns: list[dict[str, Any]]
    prefill_rows: int
    free: list[bool]
    decisions: dict[str, list[str]]
    trees: dict[str, list[Nodes | None]]
    work: dict[str, tuple[int, float]]
    kept: list[list[int]]
    pending: list[int]
    tokens: list[list[int]] = field(default_factory=list)
    rows: int = 0
    context: float = 0.0
    verify_ms: float = 0.0
    draft_ms: float = 0.0
    late: bool = False

    @staticmethod
    def of(
        turns: Sequence[Turn],
        prefill_rows: int,
        free: list[bool],
        decisions: Mapping[str, list[str]],
        work: Mapping[str, DraftWork],
        kept: list[list[int]],
        pending: list[int],
        late: bool = False,
    ) -> StepRecord:
        """What was decided; the outcome is filled in by `end`."""
        return StepRecord(
            [_turn(turn) for turn in turns],
            prefill_rows,
            free,
            dict(decisions),
            {name: [None if tree is None else _nodes(tree) for tree in done.trees] for name, done in work.items()},
            {name: (done.levels, done.ms) for name, done in work.items()},
            kept,
            pending,
            late=late,
        )

    def end(self, outcome: Outcome) -> dict[str, object]:
        """The whole step as plain values."""
        self.tokens, self.rows = outcome.tokens, outcome.rows
        self.context, self.verify_ms, self.draft_ms = outcome.context, outcome.verify_ms, outcome.draft_ms
        return asdict(self)


def rebuilt_tree(controller: Controller, drafter: str, turn: Turn, pending: int, nodes: Nodes) -> TokenTree:
    """The tree as proposed, scored by ``controller`` as it is now."""
    tree = TokenTree(pending)
    odds = controller.cell_odds(turn.control.skills.get(drafter))
    for parent, token, cell in nodes:
        tree.add(parent, token, tree.scores[parent] + odds(cell, tree.depths[parent] + 1), drafter, cell)
    return tree


def rebuilt_turn(controller: Controller, values: Mapping[str, Any], controls: dict[int, SequenceControl]) -> Turn:
    """A turn from its plain values; ``controls`` keeps the sequences seen so far."""
    fields = dict(values)
    key, bucket = fields.pop("control")
    if key not in controls:
        controls[key] = controller.control(key, bucket)
    return Turn(controls[key], **fields)


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "control": (turn.control.key, turn.control.bucket), "context": turn.context, "nodes": turn.nodes,
        "room": turn.room, "forced": turn.forced, "lag": turn.lag, "fresh": turn.fresh, "backlog": dict(turn.backlog),
    }  # fmt: skip


def _nodes(tree: TokenTree) -> Nodes:
    return list(zip(tree.parents[1:], tree.tokens[1:], tree.cells[1:], strict=True))


VERSION = 1


class TraceWriter:
    """Appends steps to a file that begins with what the controller was built from.

    Raises:
        ConfigError: the file can not be written.
    """

    def __init__(self, path: Path, controller: Mapping[str, Any]) -> None:
        try:
            # Lives as long as the engine.
            self._file = open(path.expanduser(), "w", buffering=1 << 16, encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"engine.speculation.trace_file: can not write {path} ({error.strerror})") from None
        self._line({"specdec_trace": VERSION, "controller": dict(controller)})

    def write(self, step: StepTrace) -> None:
        """One step."""
        self._line(dataclasses.asdict(step))

    def close(self) -> None:
        """Nothing can be written any more."""
        self._file.close()

    def _line(self, value: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")) + "\n")


def read_trace(path: Path) -> tuple[dict[str, Any], Iterator[StepTrace]]:
    """The controller's description and the steps, read as they are asked for; a line cut short by a crash ends them.

    Raises:
        ConfigError: the file can not be read, or is no trace of this version; also while the steps are read, at a
            line that is no step.
    """
    try:
        with open(path, encoding="utf-8") as file:
            header = json.loads(file.readline() or "null")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: can not be read as a trace ({error})") from None
    if not isinstance(header, dict) or header.get("specdec_trace") != VERSION:
        raise ConfigError(f"{path}: is no decision trace of version {VERSION}; write one with --trace-file")
    if not isinstance(header.get("controller"), dict):
        raise ConfigError(f"{path}: line 1 does not say what the controller was built from; the file was altered")
    return header["controller"], _steps(path)


def _steps(path: Path) -> Iterator[StepTrace]:
    with open(path, encoding="utf-8", errors="replace") as file:
        next(file)
        for number, line in enumerate(file, 2):
            try:
                values = json.loads(line)
            except ValueError:
                # Lines are written whole, so only a crash leaves one without its end, and nothing comes after it.
                if line.endswith("\n"):
                    raise ConfigError(f"{path}: line {number} is no JSON; the file was altered") from None
                return
            yield _step(values, f"{path}: line {number}")


def _step(values: Any, where: str) -> StepTrace:
    try:
        drafters = [DrafterTrace(**drafter) for drafter in values["drafters"]]
        return StepTrace(**(values | {"drafters": drafters}))
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{where} is no step of a trace ({error})") from None


logger = logging.getLogger(__name__)


class TraceLog:
    """A bounded ring of `StepTrace`. ``keeps_replay``: whether steps should carry what a replay needs."""

    def __init__(self, steps: int, writer: TraceWriter | None = None) -> None:
        self._ring: deque[StepTrace] = deque(maxlen=steps)
        self._writer = writer
        self.keeps_replay = writer is not None
        self.enabled = steps > 0 or writer is not None
        self.count = 0

    def add(self, step: StepTrace) -> None:
        """The newest step."""
        self.count += 1
        if self._writer is not None:
            self._write(self._writer, step)
            step.replay = {}  # on disk now; the ring stays small
        self._ring.append(step)

    def _write(self, writer: TraceWriter, step: StepTrace) -> None:
        """A full disk ends the file, not the requests."""
        try:
            writer.write(step)
        except OSError as error:
            logger.error("the trace file can not be written any more (%s); it ends at step %d", error, step.step)
            self._writer, self.keeps_replay = None, False

    def last(self, limit: int) -> list[StepTrace]:
        """The newest ``limit`` steps, oldest first."""
        steps = list(self._ring)
        return steps[-limit:] if limit > 0 else []

    def close(self) -> None:
        """Finish the file."""
        writer, self._writer, self.keeps_replay = self._writer, None, False
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                logger.error("the end of the trace file could not be written (%s)", error)


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
