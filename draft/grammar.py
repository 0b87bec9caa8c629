"""Drafts what a grammar forces: keys, punctuation and choices that leave only one way on."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from draft.protocol import Drafter, DraftTask
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree

CERTAINTY = 0.99  # a long stretch may be split otherwise once a part of it stands, or end by another end token


class GrammarDrafter(Drafter):
    """Proposes the tokens of the forced text as one chain; without a grammar, nothing at no cost."""

    name = "grammar"

    def serves(self, sequence: Sequence) -> bool:
        """Only what has a grammar, or a start that must be spelt anew, is forced to anything."""
        return sequence.request.grammar is not None or bool(sequence.request.healing_prefix)

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        """Continue each sequence by what its grammar forces after the pending token."""
        return [_one(task) for task in tasks]


def _one(task: DraftTask) -> TokenTree:
    tree = TokenTree(task.sequence.tokens[-1])
    grammar, room = task.sequence.sampling.grammar, min(task.max_nodes, task.max_depth)
    node = 0
    for token in grammar.forced((), room) if grammar is not None and room > 0 else ():
        node = task.add(tree, node, token, CERTAINTY)
        if node < 0:
            break
    return tree
