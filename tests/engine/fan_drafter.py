"""A drafter for tests that has the answer and hides it behind wrong siblings."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from draft.protocol import Drafter, DraftTask
from specdec.core.tree import TokenTree


class FanDrafter(Drafter):
    """Proposes at each depth two wrong tokens with higher scores, one with a child, and then the right token, so that
    accepted nodes occupy slots that differ from their positions. It skips every fourth answer.

    answers: tokens by (request id, sample).
    """

    name = "fan"

    def __init__(self, vocab_size: int) -> None:
        self.answers: dict[tuple[str, int], list[int]] = {}
        self._vocab_size = vocab_size

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        """A fan of depth 3 each."""
        return [self._one(task) for task in tasks]

    def _one(self, task: DraftTask) -> TokenTree:
        sequence = task.sequence
        tree, node = TokenTree(sequence.tokens[-1]), 0
        answer = self.answers.get((sequence.request.request_id, sequence.index), [])
        for at in range(sequence.n_output, min(sequence.n_output + 3, len(answer))):
            if at % 4 == 3 or node < 0:
                break
            wrong = [(answer[at] + i) % self._vocab_size for i in (1, 2)]
            first = task.add(tree, node, wrong[0], 0.9)
            task.add(tree, node, wrong[1], 0.8, 1)
            if first >= 0:
                task.add(tree, first, answer[at], 0.9)
            node = task.add(tree, node, answer[at], 0.7, 2)
        return tree
