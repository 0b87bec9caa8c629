"""All drafters of an engine as one: isolates their faults and merges their proposals."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq

from draft.merge import merge
from draft.protocol import Drafter, DraftTask
from specdec.sequence import Sequence
from specdec.tree import TokenTree, check_tree

logger = logging.getLogger(__name__)


class DraftPanel:
    """Asks each drafter that a sequence allows and merges what comes back.

    A drafter that raises or hands over a malformed tree is logged and not asked again for those sequences; it
    costs them speed, never output.
    """

    def __init__(self, drafters: Seq[Drafter], vocab_size: int) -> None:
        self._drafters = list(drafters)
        self._vocab_size = vocab_size
        self._begun: dict[int, list[Drafter]] = {}  # per sequence, the drafters that know it
        self._asked: dict[int, set[str]] = {}  # of those, the ones still trusted

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the drafters loaded."""
        return tuple(d.name for d in self._drafters)

    def begin(self, sequence: Sequence, allowed: tuple[str, ...] | None) -> None:
        """A sequence enters; ``allowed`` None: every drafter may propose for it."""
        begun = [d for d in self._drafters if allowed is None or d.name in allowed]
        self._begun[id(sequence)] = begun
        self._asked[id(sequence)] = {d.name for d in begun}
        self._tell(sequence, lambda drafter: drafter.begin(sequence))

    def observe(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """Tokens were committed."""
        self._tell(sequence, lambda drafter: drafter.observe(sequence, tokens))

    def rewind(self, sequence: Sequence) -> None:
        """The sequence was preempted."""
        self._tell(sequence, lambda drafter: drafter.rewind(sequence))

    def end(self, sequence: Sequence) -> None:
        """The sequence left: every drafter that knows it is told, trusted or not, or it would remember it for ever."""
        self._asked[id(sequence)] = {d.name for d in self._begun.pop(id(sequence), [])}
        self._tell(sequence, lambda drafter: drafter.end(sequence))
        del self._asked[id(sequence)]

    def drafts_for(self, sequence: Sequence) -> bool:
        """Whether any drafter may still propose for it."""
        return bool(self._asked.get(id(sequence)))

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        """One tree per task, at most its ``max_nodes`` draft nodes."""
        proposals: list[list[TokenTree]] = [[TokenTree(task.sequence.tokens[-1])] for task in tasks]
        for drafter in self._drafters:
            turns = [i for i, task in enumerate(tasks) if drafter.name in self._asked.get(id(task.sequence), ())]
            if not turns:
                continue
            try:
                trees = drafter.propose([tasks[i] for i in turns])
                if len(trees) != len(turns):
                    raise ValueError(f"{len(turns)} tasks but {len(trees)} trees")
            except Exception:
                logger.exception("drafter %s failed; not asked again for %d sequence(s)", drafter.name, len(turns))
                for i in turns:
                    self._asked[id(tasks[i].sequence)].discard(drafter.name)
                continue
            for i, tree in zip(turns, trees, strict=True):
                if self._sound(drafter, tasks[i], tree):
                    proposals[i].append(tree)
        return [merge(trees, task.max_nodes) for trees, task in zip(proposals, tasks, strict=True)]

    def _sound(self, drafter: Drafter, task: DraftTask, tree: TokenTree) -> bool:
        try:
            check_tree(tree.tokens, tree.parents, self._vocab_size)
            if tree.tokens[0] != task.sequence.tokens[-1]:
                raise ValueError("the root is not the pending token")
        except ValueError as error:
            logger.error("drafter %s handed over a bad tree (%s); not asked again for it", drafter.name, error)
            self._asked[id(task.sequence)].discard(drafter.name)
            return False
        return True

    def _tell(self, sequence: Sequence, call: Callable[[Drafter], None]) -> None:
        trusted = self._asked.get(id(sequence), set())
        for drafter in self._drafters:
            if drafter.name not in trusted:
                continue
            try:
                call(drafter)
            except Exception:
                logger.exception("drafter %s failed; not asked again for this sequence", drafter.name)
                trusted.discard(drafter.name)
