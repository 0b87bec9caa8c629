"""All drafters of an engine: their calls, their sequences, and the isolation of their faults."""

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
from specdec.control.inputs import DraftWork, Match
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree, check_tree
from specdec.core.types import selects

logger = logging.getLogger(__name__)

MAX_FAULTS = 3  # consecutive faulty calls after which a drafter is suspended for all sequences
SUSPENSION_S = 300.0  # seconds
STALL_MS = 2000.0  # milliseconds of one call; a longer one is a fault
PREFILL_PER_STALL = 64  # tokens of prefill that allow a call another ``stall_ms``


class DrafterManager:
    """Calls drafters and isolates their faults.

    If a drafter raises, exceeds ``stall_ms`` or returns a malformed tree, the fault is logged and the drafter is
    disabled for those sequences. They lose speed, never output. After `MAX_FAULTS` consecutive faults it is suspended
    for all sequences.

    cells: number of calibration cells that nodes may name.
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
        self.lookups = [d.name for d in drafters if not d.model_based]
        self.models = [d.name for d in drafters if d.model_based]  # whose proposals take a forward
        self.tree_rows = {d.name: d.tree_rows for d in drafters}  # see `Drafter`
        self._vocab_size, self._stall_ms, self._cells, self._clock = vocab_size, stall_ms, cells, clock
        self._enabled: dict[Sequence, dict[str, bool]] = {}  # of the drafters that started a sequence
        self._faults = dict.fromkeys(self._drafters, 0)
        self._suspended_until = dict.fromkeys(self._drafters, -math.inf)

    def begin(self, sequence: Sequence) -> None:
        """A sequence starts. Of the drafters that its request names, those that can draft for it begin."""
        allowed = sequence.request.speculation.drafters if sequence.drafts else ()
        enabled = self._enabled[sequence] = {}
        for name, drafter in self._drafters.items():
            try:
                if selects(allowed, name) and drafter.serves(sequence):
                    enabled[name] = True
            except Exception:
                logger.exception("drafter %s failed; it is disabled for a request", name)
        self._notify(sequence, lambda drafter: drafter.begin(sequence))

    def observe(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """``tokens`` were committed."""
        self._notify(sequence, lambda drafter: drafter.observe(sequence, tokens))

    def features(self, sequence: Sequence, start: int, rows: Tensor) -> None:
        """Pass on the target's hidden states (see `Drafter.features`)."""
        self._notify(sequence, lambda drafter: drafter.features(sequence, start, rows))

    def rewind(self, sequence: Sequence) -> None:
        """The sequence was preempted."""
        self._notify(sequence, lambda drafter: drafter.rewind(sequence))

    def end(self, sequence: Sequence) -> None:
        """The sequence ended. Disabled drafters release their state too."""
        self._enabled[sequence] = dict.fromkeys(self._enabled.get(sequence, ()), True)
        self._notify(sequence, lambda drafter: drafter.end(sequence))
        del self._enabled[sequence]

    def may_draft(self, sequence: Sequence) -> bool:
        """Whether any drafter may propose for a sequence that drafts, also before `begin`."""
        if sequence in self._enabled:
            return any(self._enabled[sequence].values())
        return any(selects(sequence.request.speculation.drafters, name) for name in self._drafters)

    def may_propose(self, name: str, sequence: Sequence) -> bool:
        """Whether drafter ``name`` may propose for the sequence now."""
        enabled = self._enabled.get(sequence, {}).get(name, False)
        return enabled and self._clock() >= self._suspended_until[name]

    def pending_prefill(self, name: str, sequence: Sequence) -> tuple[int, int]:
        """Tokens that model-based drafter ``name`` must compute before it can propose for the sequence: if it reads the
        whole text, and if it reads the end alone."""
        drafter = cast(ModelBasedDrafter, self._drafters[name])
        try:
            whole = max(0, int(drafter.pending_prefill(sequence)))
            return whole, max(0, min(whole, int(drafter.tail_prefill(sequence))))
        except Exception:
            self._disable(name, [sequence], "failed to report its pending prefill")
            return 0, 0

    def match(self, name: str, sequences: Seq[Sequence]) -> list[Match]:
        """The matches of lookup drafter ``name``; none where it fails."""
        try:
            began = self._clock()
            found = list(map(Match, self._drafters[name].match(sequences)))
            took_ms = (self._clock() - began) * 1e3
            if len(found) != len(sequences):
                raise ValueError(f"{len(sequences)} sequences but {len(found)} matches")
            if took_ms > self._stall_ms:
                raise TimeoutError(f"took {took_ms:.0f} ms")
        except Exception:
            self._disable(name, sequences, "failed to match")
            self._count_fault(name)
            return [Match.NONE] * len(sequences)
        return found

    def propose(self, name: str, tasks: Seq[DraftTask | None], prefill: int = 0) -> DraftWork:
        """Run drafter ``name``. tasks: per sequence; None: it does not propose. prefill: tokens it computes first."""
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
            self._disable(name, sequences, "failed")
            self._count_fault(name)
            return work
        work.ms = (self._clock() - began) * 1e3
        for (i, task), tree in zip(turns, trees, strict=True):
            if self._is_well_formed(name, task, tree):
                work.trees[i] = tree
                grown = () if self.tree_rows[name] else tree.depths
                work.levels = max(work.levels, int(task.begun and task.max_nodes > 0), *grown)
        stalled = work.ms > self._stall_ms * (1 + prefill / PREFILL_PER_STALL)
        if stalled:
            self._disable(name, sequences, f"took {work.ms:.0f} ms")
        if stalled or len(work.trees) - work.trees.count(None) < len(turns):
            self._count_fault(name)
        else:
            self._faults[name] = 0
        return work

    def _is_well_formed(self, name: str, task: DraftTask, tree: TokenTree) -> bool:
        """Whether ``tree`` is well-formed and within the task's limits."""
        try:
            check_tree(tree, self._vocab_size, self._cells)
            if tree.tokens[0] != task.sequence.tokens[-1]:
                raise ValueError("the root is not the pending token")
            if len(tree) - 1 > task.max_nodes:
                raise ValueError(f"{len(tree) - 1} nodes, at most {task.max_nodes} are allowed")
        except Exception as error:
            self._disable(name, [task.sequence], f"returned a malformed tree ({error})")
            return False
        return True

    def _count_fault(self, name: str) -> None:
        self._faults[name] += 1
        if self._faults[name] >= MAX_FAULTS:
            logger.error("drafter %s failed %d times; it is suspended for %.0f s", name, MAX_FAULTS, SUSPENSION_S)
            self._faults[name] = 0
            self._suspended_until[name] = self._clock() + SUSPENSION_S

    def _disable(self, name: str, sequences: Seq[Sequence], what: str) -> None:
        fault = sys.exc_info()[0] is not None
        logger.error("drafter %s %s; it is disabled for %d request(s)", name, what, len(sequences), exc_info=fault)
        for sequence in sequences:
            if name in self._enabled.get(sequence, ()):
                self._enabled[sequence][name] = False

    def _notify(self, sequence: Sequence, call: Callable[[Drafter], None]) -> None:
        for name, enabled in self._enabled.get(sequence, {}).items():
            if enabled:
                try:
                    call(self._drafters[name])
                except Exception:
                    self._disable(name, [sequence], "failed")
