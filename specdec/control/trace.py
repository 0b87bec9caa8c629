"""The decision trace: steps as plain values, in memory and on disk, and their replay."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, TextIO, cast

from specdec.control.controller import Controller
from specdec.control.inputs import DraftDecision, DraftWork, Outcome, Plan, SequenceHistory, SequenceInputs, StepInputs
from specdec.core.tree import TokenTree
from specdec.core.types import StepTrace, trace_dict, trace_step
from specdec.errors import ConfigError

logger = logging.getLogger(__name__)

Nodes = list[tuple[int, int, int, float]]  # (parent, token, cell, score) of each draft node


def step_record(step: StepInputs, plan: Plan, outcome: Outcome, late: bool) -> dict[str, Any]:
    """What a replay needs of a step, as plain values.

    late: the step was decided before the previous step's outcome was observed.
    """
    drafted = step.drafted
    return {
        "sequences": [_plain(one) for one in step.sequences],
        "prefill_rows": step.prefill_rows,
        "mean_context": step.prices.context,  # tokens
        # By drafter, per sequence; a tree is None where it did not propose.
        "decisions": {name: work.decisions for name, work in drafted.items()},
        "trees": {
            name: [None if tree is None else _nodes(tree) for tree in work.trees] for name, work in drafted.items()
        },
        "work": {name: (work.levels, work.ms) for name, work in drafted.items()},  # by drafter
        "kept": plan.kept,  # per sequence, the nodes verified
        "late": late,
        "rested": step.rested,  # as in `StepInputs`
        "outcome": asdict(outcome),
    }


def _plain(one: SequenceInputs) -> dict[str, Any]:
    """The fields; the history is (key, bucket)."""
    values = {name: getattr(one, name) for name in one.__slots__}
    return values | {"history": (one.history.key, one.history.bucket)}


def _nodes(tree: TokenTree) -> Nodes:
    return list(zip(tree.parents[1:], tree.tokens[1:], tree.cells[1:], tree.scores[1:], strict=True))


VERSION = 5  # of the file format
KEPT_FILES = 3  # previous files, named FILE.1 (the newest) to FILE.3


class TraceWriter:
    """Writes steps to a file, after a header with the controller's arguments.

    Each step is flushed to the system, so a killed process loses none. A file is begun with its first step, and at
    ``max_bytes``; the former ones are rotated then.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path, controller: Mapping[str, Any], max_bytes: int = 256 << 20) -> None:
        self._path, self._controller, self._max_bytes = path, dict(controller), max_bytes
        self._file: TextIO | None = None
        self._written = 0  # bytes of the file
        self._continues = False  # whether a former file is of the same run
        try:
            open(path, "a", opener=_own).close()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # a full disk does not prevent a start
                said = f"engine.speculation.trace_file: {path} cannot be written ({error.strerror})"
                raise ConfigError(said) from None

    def write(self, step: StepTrace) -> None:
        """Append a step. Raises OSError."""
        begins = self._file is None or self._written >= self._max_bytes
        if begins:
            self.close()
        try:
            if begins:
                self._begin()
            self._line(trace_dict(step) | {"replay": step.replay})
        except OSError:
            if begins and self._file is not None:  # a file without a step would push an older one out
                with suppress(OSError):
                    self.close()
                os.truncate(self._path, 0)
            raise

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _begin(self) -> None:
        if self._path.is_file() and self._path.stat().st_size:
            for number in range(KEPT_FILES, 0, -1):
                newer = previous_file(self._path, number - 1)
                if newer.exists():
                    newer.replace(previous_file(self._path, number))
        self._file = open(self._path, "w", encoding="utf-8", opener=_own)  # noqa: SIM115 - closed by `close`
        self._written = 0
        self._line({"specdec_trace": VERSION, "controller": self._controller, "continues": self._continues})
        self._continues = True

    def _line(self, value: Mapping[str, Any]) -> None:
        file = cast(TextIO, self._file)
        self._written += file.write(json.dumps(value, separators=(",", ":")) + "\n")
        file.flush()


def _own(path: str, flags: int) -> int:
    """Open a file that only its owner may read, if it is a new one: it holds the tokens of all callers."""
    return os.open(path, flags, 0o600)


def previous_file(path: Path, number: int) -> Path:
    """The file that ``path`` was ``number`` rotations ago."""
    return path.with_name(f"{path.name}.{number}") if number else path


def _parts(path: Path) -> list[Path]:
    """The files of the run whose last file is ``path``, oldest first.

    Raises:
        ConfigError: a file is no trace, or the run's first file was deleted by rotation.
    """
    stem, _, suffix = path.name.rpartition(".")
    newest, number = path, 0
    if stem and suffix.isdecimal():
        with suppress(ConfigError):  # no trace: the number is part of the name
            _header(path.with_name(stem))
            newest, number = path.with_name(stem), int(suffix)
    parts = [path]
    while _header(parts[0]).get("continues"):
        number += 1
        parts.insert(0, previous_file(newest, number))
        if not parts[0].exists():
            raise ConfigError(f"{path}: continues a file that was deleted; only the last {KEPT_FILES} are kept")
    return parts


def read_trace(path: Path) -> tuple[dict[str, Any], Iterator[StepTrace]]:
    """The controller's arguments and the steps, which are read lazily. A last line cut off by a crash is skipped.

    Raises:
        ConfigError: the file cannot be read, or is no trace of this version; while the steps are read, also for a line
            that is no step.
    """
    return _header(path)["controller"], _steps(path)


def _header(path: Path) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            header = json.loads(file.readline() or "null")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as a trace ({error})") from None
    if header is None:
        raise ConfigError(f"{path}: is empty; the server writes it from its first step on")
    if not isinstance(header, dict) or header.get("specdec_trace") != VERSION:
        raise ConfigError(f"{path}: is no decision trace of version {VERSION}; write one with --trace-file")
    if not isinstance(header.get("controller"), dict):
        raise ConfigError(f"{path}: line 1 has no arguments of the controller; the file was altered")
    return header


def _steps(path: Path) -> Iterator[StepTrace]:
    with open(path, encoding="utf-8", errors="replace") as file:
        next(file)
        for number, line in enumerate(file, 2):
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                # Only a crash leaves a line without its end, and nothing follows it.
                if line.endswith("\n"):
                    raise ConfigError(f"{path}: line {number} is no JSON; the file was altered") from None
                return
            yield _step(values, f"{path}: line {number}")


def _step(values: Any, where: str) -> StepTrace:
    try:
        return trace_step(values)
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{where} is no step of a trace ({error})") from None


TRACE_STEPS = 1024  # steps kept in memory, for `GetTrace` and the playground


class TraceLog:
    """The last ``steps`` steps; all steps go to ``writer``. ``keeps_replay``: whether steps need a `step_record`.
    ``began_s``: start of the engine, by its clock.

    The file ends with the first step that cannot be written, as on a full disk.
    """

    def __init__(self, steps: int, writer: TraceWriter | None = None, began_s: float = 0.0) -> None:
        self._ring: deque[StepTrace] = deque(maxlen=steps)
        self._writer, self.began_s = writer, began_s
        self.keeps_replay = writer is not None
        self.enabled = steps > 0 or writer is not None
        self.count = 0

    def add(self, step: StepTrace) -> None:
        """Append a step."""
        self.count += 1
        if self._writer is not None:
            try:
                self._writer.write(step)
            except OSError as error:
                logger.error("the trace file cannot be written (%s); it ends before step %d", error, step.step)
                self.close()
            step.replay = {}  # only the file keeps it, to bound memory
        self._ring.append(step)

    def replace_writer(self, writer: TraceWriter) -> None:
        """Close the file, and write later steps with ``writer``."""
        self.close()
        self._writer, self.keeps_replay = writer, True

    def last(self, limit: int) -> list[StepTrace]:
        """The last ``limit`` steps, oldest first."""
        steps = list(self._ring)
        return steps[-limit:] if limit > 0 else []

    def close(self) -> None:
        """Close the file."""
        writer, self._writer, self.keeps_replay = self._writer, None, False
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                logger.error("the trace file could not be completed (%s)", error)


def replay_file(path: Path) -> Replay:
    """Repeat the decisions of the run whose last trace file is ``path``.

    Raises:
        ConfigError: the file is no trace, or lacks the values that a replay needs.
    """
    parts = _parts(path)
    try:
        replay = Replay(Controller.from_dict(_header(parts[0])["controller"]))
        for step in chain.from_iterable(map(_steps, parts)):
            if step.replay:
                replay.step(step.replay, step.step)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{path}: is damaged, or was written by another version ({error!r})") from None
    if not replay.steps:
        raise ConfigError(f"{path}: has no step to replay; record requests in mode AUTO with --trace-file")
    return replay


class Replay:
    """Repeats recorded decisions with ``controller``, which observes the recorded outcomes in the recorded order."""

    def __init__(self, controller: Controller) -> None:
        self.steps = 0  # decided again
        self.differences: list[str] = []  # one line per decision that differs
        self._controller = controller
        self._histories: dict[int, SequenceHistory] = {}
        self._unobserved: tuple[StepInputs, Plan, Outcome] | None = None  # the last step

    def step(self, record: Mapping[str, Any], number: int) -> None:
        """Repeat the decision of a `step_record` and note differences; its proposals are used in any case."""
        self.steps += 1
        if not record["late"]:
            self._observe()
        controller, sequences = self._controller, [self._inputs(values) for values in record["sequences"]]
        prices = controller.estimates.prices([record["mean_context"]] * len(sequences), record["prefill_rows"])
        step = StepInputs(prices, sequences, record["prefill_rows"], rested=record["rested"])
        while (plan := controller.decide(step)).requests:
            for request in plan.requests:
                name = request.drafter
                recorded = list(map(DraftDecision, record["decisions"][name]))
                if request.decisions != recorded:
                    made, was = list(map(str, request.decisions)), list(map(str, recorded))
                    self.differences.append(f"step {number}: {name} {made}, recorded {was}")
                trees = [
                    None if nodes is None else _tree(name, one.pending, nodes)
                    for one, nodes in zip(sequences, record["trees"][name], strict=True)
                ]
                levels, ms = record["work"][name]
                step.drafted[name] = DraftWork(
                    trees, levels, ms, recorded, sum(request.prefill.values()), request.pending
                )
        if plan.kept != record["kept"]:
            self.differences.append(f"step {number}: nodes verified {plan.kept}, recorded {record['kept']}")
        self._observe()
        self._unobserved = step, plan, Outcome(**record["outcome"])

    def _observe(self) -> None:
        if self._unobserved is not None:
            self._controller.observe(*self._unobserved)
        self._unobserved = None

    def _inputs(self, values: dict[str, Any]) -> SequenceInputs:
        key, bucket = values["history"]
        history = self._histories.setdefault(key, SequenceHistory(key, bucket))
        return SequenceInputs(**(values | {"history": history}))


def _tree(drafter: str, pending: int, nodes: Nodes) -> TokenTree:
    """The proposed tree."""
    tree = TokenTree(pending)
    for parent, token, cell, score in nodes:
        tree.add(parent, token, score, drafter, cell)
    return tree
