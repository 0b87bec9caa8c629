"""Drafts the text that a grammar forces, such as keys and punctuation, and the end of thoughts at their budget."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from draft.protocol import Drafter, DraftTask
from specdec.control.inputs import Match
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree

CERTAINTY = 0.99  # chance of a forced token: the target may split the text into other tokens


class GrammarDrafter(Drafter):
    """Proposes the tokens of the forced text as one chain."""

    name = "grammar"

    def serves(self, sequence: Sequence) -> bool:
        """Whether its request has a grammar or a thinking budget."""
        return sequence.request.grammar is not None or sequence.request.sampling.thinking_budget >= 0

    def match(self, sequences: Seq[Sequence]) -> list[Match]:
        grammars = [sequence.sampling.grammar for sequence in sequences]
        return [Match.STRONG if grammar is not None and grammar.forced((), 1) else Match.NONE for grammar in grammars]

    def fill(self, task: DraftTask, tree: TokenTree) -> None:
        grammar, room = task.sequence.sampling.grammar, min(task.max_nodes, task.max_depth)
        node = 0
        for token in grammar.forced((), room) if grammar is not None and room > 0 else ():
            node = task.add(tree, node, token, CERTAINTY)
            if node < 0:
                break
