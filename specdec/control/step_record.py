"""A step as plain values: what the controller was told and what it decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specdec.control.controller import Controller
from specdec.control.outcome import DraftWork, Outcome
from specdec.control.sequence_control import SequenceControl
from specdec.control.turn import Turn
from specdec.tree import TokenTree

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
