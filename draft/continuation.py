"""Grows a tree of likely continuations, best first, from contexts in several texts at once."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Seq

from draft.protocol import DraftTask
from draft.suffix_automaton import SuffixAutomaton
from specdec.tree import TokenTree

Context = tuple[SuffixAutomaton, int, int]
"""(text, state, tokens matched): the path to a node, as far back as that text knows it."""

MAX_CONTEXTS = 4  # the longest ones of a node; what more of them add is lost in the noise
ENOUGH = 0.9  # once so much of the chance is given away, shorter contexts are not asked


def expand(task: DraftTask, tree: TokenTree, contexts: Seq[Context]) -> None:
    """Fill ``tree`` with the best continuations of ``contexts``, which are those of its root."""
    # (minus score, order, parent, token, prob, rank, contexts): `order` settles equal scores, so that the same
    # texts give the same tree every time.
    heap: list[tuple[float, int, int, int, float, int, list[Context]]] = []
    order, node, width = 0, 0, task.width
    while True:
        if tree.depths[node] < task.max_depth:
            above = tree.scores[node]
            for rank, (prob, token, following) in enumerate(children(contexts, width)):
                heapq.heappush(heap, (-above - math.log(prob), order, node, token, prob, rank, following))
                order += 1
        node = -1
        while heap and node < 0:
            if len(tree) > task.max_nodes:
                return
            _, _, parent, token, prob, rank, contexts = heapq.heappop(heap)
            node = task.add(tree, parent, token, prob, rank)
        if node < 0:
            return


def children(contexts: Seq[Context], width: int) -> list[tuple[float, int, list[Context]]]:
    """(prob, token, its contexts) of the ``width`` likeliest next tokens.

    The longest context is asked first and gives each token that followed it

        share^1.5 (1 - 1 / ((1 + 0.4 length) seen^0.7))

    of the chance; the next longest shares out what is left, as in prediction by partial matching (Cleary and Witten
    1984). The constants are a fit to source code: how often the most frequent follower came again, by the length of
    the context and by how often it was seen. A context that has branched before tends to branch anew: hence the 1.5.
    """
    if len(contexts) == 1:  # most nodes of a long chain
        automaton, state, length = contexts[0]
        token, target = automaton.sole_follower(state)
        if token >= 0:
            return [(_trust(length, automaton.counts[target]), token, [(automaton, target, length + 1)])]
    left = 1.0
    probs: dict[int, float] = {}
    after: dict[int, list[Context]] = {}
    for automaton, state, length in contexts:
        counts = automaton.counts
        options = [(token, target) for token, target in automaton.followers(state) if token >= 0]
        while not options and state > 0:  # the end of a text: fall back on what shorter contexts saw elsewhere
            state = automaton.links[state]
            length = automaton.lengths[state]
            options = [(token, target) for token, target in automaton.followers(state) if token >= 0]
        if state <= 0:
            continue
        seen = sum([counts[target] for _, target in options])
        trust = left * _trust(length, seen)
        for token, target in options:
            prob = trust * (counts[target] / seen) ** 1.5
            left -= prob
            if token in probs:
                probs[token] += prob
                after[token].append((automaton, target, length + 1))
            else:
                probs[token] = prob
                after[token] = [(automaton, target, length + 1)]
        if left < 1.0 - ENOUGH:
            break
    if len(probs) == 1:
        return [(prob, token, after[token]) for token, prob in probs.items()]
    best = heapq.nlargest(width, probs.items(), key=lambda item: item[1])
    return [(prob, token, after[token]) for token, prob in best]


def _trust(length: int, seen: int) -> float:
    return 1.0 - 1.0 / ((1.0 + 0.4 * length) * seen**0.7)
