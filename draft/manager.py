"""All drafters of an engine: who knows which sequence, who is still trusted, and what each proposes."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import cast

from torch import Tensor

from draft.protocol import Drafter, DraftTask, ModelBasedDrafter
from specdec.control.inputs import DraftWork
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree, check_tree

logger = logging.getLogger(__name__)

STRIKES = 3  # faulty calls in a row after which a drafter rests for everyone
REST_S = 300.0
LEAST_SCORE = -1e6
READS_AT_ONCE = 64  # tokens of backlog that earn a drafter as much time again as it has for a step


class DrafterManager:
    """Asks drafters and isolates their faults.

    A drafter that raises, takes longer than ``stall_ms`` or hands over a malformed tree is logged and not asked again
    for those sequences; it costs them speed, never output. After three such calls in a row it rests for everyone.

    cells: of the calibration that nodes may name. model_based: whether proposing takes a model's forward, by
    drafter.
    """

    def __init__(
        self,
        drafters: Seq[Drafter],
        vocab_size: int,
        stall_ms: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
        cells: int = 0,
    ) -> None:
        self._drafters = {d.name: d for d in drafters}
        self.model_based = {d.name: d.model_based for d in drafters}
        self._vocab_size, self._stall_ms, self._cells, self._clock = vocab_size, stall_ms, cells, clock
        self._begun: dict[Sequence, list[Drafter]] = {}  # per sequence, the drafters that know it
        self._trusted: dict[Sequence, set[str]] = {}  # of those, the ones still trusted
        self._strikes = dict.fromkeys(self._drafters, 0)
        self._rests_until = dict.fromkeys(self._drafters, -math.inf)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the drafters loaded."""
        return tuple(self._drafters)

    def begin(self, sequence: Sequence, allowed: tuple[str, ...] | None) -> None:
        """A sequence enters; ``allowed`` None: every drafter may propose for it."""
        begun = [d for d in self._drafters.values() if allowed is None or d.name in allowed]
        begun = [d for d in begun if self._serves(d, sequence)]
        self._begun[sequence] = begun
        self._trusted[sequence] = {d.name for d in begun}
        self._tell(sequence, lambda drafter: drafter.begin(sequence))

    def observe(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """Tokens were committed."""
        self._tell(sequence, lambda drafter: drafter.observe(sequence, tokens))

    def features(self, sequence: Sequence, start: int, rows: Tensor) -> None:
        """The target's hidden states of positions ``start`` on; before `observe`, while the rows are still there."""
        self._tell(sequence, lambda drafter: drafter.features(sequence, start, rows))

    def rewind(self, sequence: Sequence) -> None:
        """The sequence was preempted."""
        self._tell(sequence, lambda drafter: drafter.rewind(sequence))

    def end(self, sequence: Sequence) -> None:
        """The sequence left: every drafter that knows it is told, trusted or not, or it would remember it for ever."""
        self._trusted[sequence] = {d.name for d in self._begun.pop(sequence, [])}
        self._tell(sequence, lambda drafter: drafter.end(sequence))
        del self._trusted[sequence]

    def drafts_for(self, sequence: Sequence) -> bool:
        """Whether any drafter may still propose for it."""
        return bool(self._trusted.get(sequence))

    def may_draft(self, sequence: Sequence, allowed: tuple[str, ...] | None) -> bool:
        """Whether any drafter may propose for it; ``allowed`` as for `begin`, which it may still have before it."""
        if sequence in self._begun:
            return self.drafts_for(sequence)
        return any(allowed is None or name in allowed for name in self._drafters)

    def trusts(self, name: str, sequence: Sequence) -> bool:
        """Whether drafter ``name`` may propose for it now."""
        if name not in self._trusted.get(sequence, ()):
            return False
        until = self._rests_until[name]
        return until == -math.inf or self._clock() >= until

    def backlog(self, name: str, sequence: Sequence) -> int:
        """Tokens model-based drafter ``name`` must read before it can draft for a sequence that it knows."""
        try:
            return max(0, int(cast(ModelBasedDrafter, self._drafters[name]).backlog(sequence)))
        except Exception:
            self._distrust(name, [sequence], "failed to tell its backlog")
            return 0

    def ask(self, name: str, tasks: Seq[DraftTask | None], backlog: int = 0) -> DraftWork:
        """Let ``name`` propose; None marks sequences that are not its turn. ``backlog``: tokens it reads first."""
        work = DraftWork([None] * len(tasks))
        turns = [(i, task) for i, task in enumerate(tasks) if task is not None]
        if not turns:
            return work
        sequences = [task.sequence for _, task in turns]
        began = self._clock()
        try:
            trees = self._drafters[name].propose([task for _, task in turns])
            if len(trees) != len(turns):
                raise ValueError(f"{len(turns)} tasks but {len(trees)} trees")
        except Exception:
            work.ms = (self._clock() - began) * 1e3
            self._distrust(name, sequences, "failed")
            self._strike(name)
            return work
        work.ms = (self._clock() - began) * 1e3
        for (i, task), tree in zip(turns, trees, strict=True):
            if self._sound(name, task, tree):
                work.trees[i] = tree
                work.levels = max(work.levels, min(task.max_nodes, 1), *tree.depths)
        stalled = work.ms > self._stall_ms * (1 + backlog / READS_AT_ONCE)
        if stalled:
            self._distrust(name, sequences, f"took {work.ms:.0f} ms")
        if stalled or len(work.trees) - work.trees.count(None) < len(turns):
            self._strike(name)
        else:
            self._strikes[name] = 0
        return work

    def _serves(self, drafter: Drafter, sequence: Sequence) -> bool:
        """Whether ``drafter`` has anything to go on: what it is not begun with, no step asks it about."""
        try:
            return drafter.serves(sequence)
        except Exception:
            logger.exception("drafter %s failed; it takes no part in a request", drafter.name)
            return False

    def _sound(self, name: str, task: DraftTask, tree: TokenTree) -> bool:
        """Whether ``tree`` is what was asked for; anything can come from a broken drafter."""
        try:
            check_tree(tree.tokens, tree.parents, self._vocab_size)
            if tree.tokens[0] != task.sequence.tokens[-1]:
                raise ValueError("the root is not the pending token")
            if len(tree) - 1 > task.max_nodes:
                raise ValueError(f"{len(tree) - 1} nodes where {task.max_nodes} were asked for")
            self._check_annotations(tree)
        except Exception as error:
            self._distrust(name, [task.sequence], f"handed over a bad tree ({error})")
            return False
        return True

    def _check_annotations(self, tree: TokenTree) -> None:
        """What the controller computes with."""
        n = len(tree)
        if not n == len(tree.scores) == len(tree.depths) == len(tree.cells) == len(tree.sources):
            raise ValueError("scores, depths, cells and sources: must be one per node")
        for node in range(1, n):
            parent, score, cell = tree.parents[node], tree.scores[node], tree.cells[node]
            if not (LEAST_SCORE < score <= 0.0 and score - tree.scores[parent] <= 1e-9):
                raise ValueError(f"scores: node {node} has {score}, a finite logarithm of at most its parent's is due")
            if tree.depths[node] != tree.depths[parent] + 1 or type(tree.tokens[node]) is not int:
                raise ValueError(f"depths, tokens: node {node} has {tree.depths[node]}, {tree.tokens[node]!r}")
            if type(cell) is not int or not -1 <= cell < max(self._cells, 0):
                raise ValueError(f"cells: node {node} names {cell!r}, there are {self._cells}")
            if not all(type(source) is str for source in tree.sources[node]):
                raise ValueError(f"sources: node {node} names {tree.sources[node]!r}")

    def _strike(self, name: str) -> None:
        self._strikes[name] += 1
        if self._strikes[name] >= STRIKES:
            logger.error("drafter %s failed %d times in a row; it rests for %.0f s", name, STRIKES, REST_S)
            self._strikes[name] = 0
            self._rests_until[name] = self._clock() + REST_S

    def _distrust(self, name: str, sequences: Seq[Sequence], what: str) -> None:
        fault = sys.exc_info()[0] is not None
        logger.error("drafter %s %s; not asked again for %d request(s)", name, what, len(sequences), exc_info=fault)
        for sequence in sequences:
            self._trusted.get(sequence, set()).discard(name)

    def _tell(self, sequence: Sequence, call: Callable[[Drafter], None]) -> None:
        trusted = self._trusted.get(sequence, set())
        for name, drafter in self._drafters.items():
            if name not in trusted:
                continue
            try:
                call(drafter)
            except Exception:
                self._distrust(name, [sequence], "failed")
