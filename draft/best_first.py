"""Trees of the likeliest continuations first, from counts of what followed contexts of several lengths."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import TypeVar

from draft.protocol import DraftTask
from specdec.control.inputs import Match
from specdec.core.tree import TokenTree

Context = TypeVar("Context")
Child = tuple[float, int, list[Context]]
"""(probability, token, contexts that end in the token)"""

MAX_CONTEXTS = 4  # contexts of a node, the longest ones; further ones change acceptance by less than its noise
MAX_SHARED_CHANCE = 0.9  # sum of the children's chances above which shorter contexts are not consulted

# The fit to source code that `share_out` describes
BRANCHING_POWER = 1.5  # of a follower's share: a context that branched before tends to branch again
LENGTH_WEIGHT = 0.4  # per token of the context
COUNT_POWER = 0.7  # of the number of times that the context was seen


def match_of(length: int) -> Match:
    """The match of a longest context of ``length`` tokens."""
    return Match(min(length, Match.STRONG))


def expand(
    task: DraftTask,
    tree: TokenTree,
    contexts: Seq[Context],
    children: Callable[[Seq[Context], int], list[Child[Context]]],
) -> None:
    """Fill ``tree`` with the likeliest continuations of ``contexts``, the contexts of its root.

    children: function (contexts of a node, maximum) -> its children, likeliest first.
    """
    # (minus score, order, parent, token, prob, rank, contexts): `order` breaks ties, so that trees are reproducible.
    heap: list[tuple[float, int, int, int, float, int, list[Context]]] = []
    order, node, width = 0, 0, task.width
    while len(tree) <= task.max_nodes:
        if tree.depths[node] < task.max_depth:
            above = tree.scores[node]
            for rank, (prob, token, following) in enumerate(children(contexts, width)):
                heapq.heappush(heap, (-above - math.log(prob), order, node, token, prob, rank, following))
                order += 1
        node = -1
        while heap and node < 0:
            _, _, parent, token, prob, rank, contexts = heapq.heappop(heap)
            node = task.add(tree, parent, token, prob, rank)
        if node < 0:
            return


def share_out(seen: Iterable[tuple[int, list[tuple[int, int, Context]]]], width: int) -> list[Child[Context]]:
    """The ``width`` likeliest next tokens, from what followed contexts of falling length.

    The longest context gives each token that followed it

        share^1.5 (1 - 1 / ((1 + 0.4 length) seen^0.7))

    of the chance. The next longest distributes the rest, as in prediction by partial matching (Cleary and Witten
    1984). The constants are a fit to source code: how often the most frequent follower recurred, by the length of the
    context and the number of times that it was seen.

    seen: per context its length and its followers (token, count, context that ends in the token).
    """
    left = 1.0
    probs: dict[int, float] = {}
    after: dict[int, list[Context]] = {}
    for length, options in seen:
        total = sum([count for _, count, _ in options])
        trusted = left * trust(length, total)
        for token, count, behind in options:
            prob = trusted * (count / total) ** BRANCHING_POWER
            left -= prob
            if token in probs:
                probs[token] += prob
                after[token].append(behind)
            else:
                probs[token] = prob
                after[token] = [behind]
        if left < 1.0 - MAX_SHARED_CHANCE:
            break
    if len(probs) == 1:
        return [(prob, token, after[token]) for token, prob in probs.items()]
    best = heapq.nlargest(width, probs.items(), key=lambda item: item[1])
    return [(prob, token, after[token]) for token, prob in best]


def trust(length: int, seen: int) -> float:
    """Chance that the only follower of a context recurs. length: the context's tokens; seen: its occurrences."""
    return 1.0 - 1.0 / ((1.0 + LENGTH_WEIGHT * length) * seen**COUNT_POWER)
