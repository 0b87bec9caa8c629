"""Trees of the likeliest continuations first, from counts of what followed contexts of several lengths."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import TypeVar

from draft.protocol import DraftTask
from specdec.core.tree import TokenTree

Context = TypeVar("Context")
Child = tuple[float, int, list[Context]]
"""(prob, token, the contexts behind it)"""

MAX_CONTEXTS = 4  # the longest ones of a node; what more of them add is lost in the noise
ENOUGH = 0.9  # once so much of the chance is given away, shorter contexts are not asked


def expand(
    task: DraftTask,
    tree: TokenTree,
    contexts: Seq[Context],
    children: Callable[[Seq[Context], int], list[Child[Context]]],
) -> None:
    """Fill ``tree`` with the best continuations of ``contexts``, which are those of its root.

    children: of a node's contexts, at most so many, likeliest first.
    """
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


def share_out(seen: Iterable[tuple[int, list[tuple[int, int, Context]]]], width: int) -> list[Child[Context]]:
    """The ``width`` likeliest next tokens, by what followed contexts of falling length.

    seen: per context, its length and (token, how often it followed, the context behind it). The longest context is
    asked first and gives each token that followed it

        share^1.5 (1 - 1 / ((1 + 0.4 length) seen^0.7))

    of the chance; the next longest shares out what is left, as in prediction by partial matching (Cleary and Witten
    1984). The constants are a fit to source code: how often the most frequent follower came again, by the length of
    the context and by how often it was seen. A context that has branched before tends to branch anew: hence the 1.5.
    """
    left = 1.0
    probs: dict[int, float] = {}
    after: dict[int, list[Context]] = {}
    for length, options in seen:
        total = sum([count for _, count, _ in options])
        trusted = left * trust(length, total)
        for token, count, behind in options:
            prob = trusted * (count / total) ** 1.5
            left -= prob
            if token in probs:
                probs[token] += prob
                after[token].append(behind)
            else:
                probs[token] = prob
                after[token] = [behind]
        if left < 1.0 - ENOUGH:
            break
    if len(probs) == 1:
        return [(prob, token, after[token]) for token, prob in probs.items()]
    best = heapq.nlargest(width, probs.items(), key=lambda item: item[1])
    return [(prob, token, after[token]) for token, prob in best]


def trust(length: int, seen: int) -> float:
    """The chance that what always followed a context of ``length`` tokens, ``seen`` so often, follows again."""
    return 1.0 - 1.0 / ((1.0 + 0.4 * length) * seen**0.7)
