"""Drafts the text that a grammar forces, such as keys and punctuation, and the end of thoughts at their budget."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from draft.protocol import Drafter, DraftTask
from specdec.control.inputs import Match
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.grammar.state import GrammarState
from specdec.grammar.thinking import ThinkingBudget

CERTAINTY = 0.99  # chance of a forced token: the target may split the text into other tokens


class GrammarDrafter(Drafter):
    """Proposes the tokens of the forced text as one chain."""

    name = "grammar"

    def serves(self, sequence: Sequence) -> bool:
        """Whether its request has a grammar or a thinking budget."""
        return sequence.request.grammar is not None or isinstance(sequence.sampling.grammar, ThinkingBudget)

    def match(self, sequences: Seq[Sequence]) -> list[Match]:
        """See `Drafter`. Whether a grammar forces anything is left to `propose`: finding out takes long."""
        found = []
        for sequence in sequences:
            grammar = sequence.sampling.grammar
            free = grammar is None or (isinstance(grammar, ThinkingBudget) and not grammar.forced((), 1))
            found.append(Match.NONE if free else Match.STRONG)
        return found

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        return [_one(task) for task in tasks]


def _one(task: DraftTask) -> TokenTree:
    tree = TokenTree(task.sequence.tokens[-1])
    grammar, room = task.sequence.sampling.grammar, min(task.max_nodes, task.max_depth)
    node = 0
    for token in grammar.forced((), room) if isinstance(grammar, GrammarState | ThinkingBudget) and room > 0 else ():
        node = task.add(tree, node, token, CERTAINTY)
        if node < 0:
            break
    return tree
