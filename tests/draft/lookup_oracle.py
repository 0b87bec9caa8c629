"""Trees of lookup drafters, by plain search through all texts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq

from draft.protocol import DraftTask
from specdec.core.tree import TokenTree

MAX_CONTEXTS, SAMPLES = 4, 16
Text = Seq[int]  # a token below 0 is no token of the vocabulary
Context = tuple[Text, Text]
"""(text, pattern): the end of the path to a node, as far as the text holds it."""
Counts = tuple[Text, list[tuple[int, int]]]
"""(pattern, [(token, count)]): what followed the pattern."""


def places(text: Text, pattern: Text) -> list[int]:
    """Positions in ``text`` behind each occurrence of ``pattern``."""
    n = len(pattern)
    return [at + n for at in range(len(text) - n + 1) if list(text[at : at + n]) == list(pattern)]


def longest_suffix(tokens: Text, text: Text, most: int) -> Text:
    """The longest suffix of ``tokens`` in ``text``, at most ``most`` tokens."""
    for n in range(min(most, len(tokens)), 0, -1):
        if places(text, tokens[-n:]):
            return tokens[-n:]
    return ()


def repeated_suffix(text: Text) -> Text:
    """The longest suffix of ``text`` that occurs earlier too."""
    return next((text[-n:] for n in range(len(text) - 1, 0, -1) if len(places(text, text[-n:])) > 1), ())


def followers(text: Text, pattern: Text) -> list[tuple[int, int]]:
    """(token, count) of what follows ``pattern``, in order of first occurrence."""
    return list(Counter(text[at] for at in places(text, pattern) if at < len(text) and text[at] >= 0).items())


def shorten(text: Text, pattern: Text) -> Text:
    """The longest suffix of ``pattern`` that occurs more often."""
    n = len(places(text, pattern))
    return next((pattern[i:] for i in range(1, len(pattern)) if len(places(text, pattern[i:])) > n), ())


def seen_in_text(text: Text, pattern: Text) -> Counts:
    """What followed the longest suffix of ``pattern`` that anything followed."""
    while pattern and not followers(text, pattern):
        pattern = shorten(text, pattern)
    return pattern, followers(text, pattern) if pattern else []


def seen_in_index(text: Text, pattern: Text) -> Counts:
    """What followed ``pattern``, by token: all tokens, or those of `SAMPLES` evenly spaced places in that order. The
    ends of files come last."""
    behind = sorted((text[at] for at in places(text, pattern)), key=lambda token: (token < 0, token))
    n = min(len(behind), SAMPLES)
    seen = dict.fromkeys(behind[i * len(behind) // n] for i in range(n))
    return pattern, [(token, behind.count(token)) for token in seen if token >= 0]


def grow(task: DraftTask, contexts: Seq[Context], seen: Callable[[Text, Text], Counts]) -> TokenTree:
    """The tree of the likeliest continuations of ``contexts``."""
    tree = TokenTree(task.sequence.tokens[-1])
    roots = sorted((c for c in contexts if c[1]), key=lambda context: -len(context[1]))[:MAX_CONTEXTS]
    left: list[tuple[float, int, int, int, float, int, list[Context]]] = []
    node, order = 0, 0
    expanded: list[Context] = list(roots)
    while len(tree) <= task.max_nodes:
        if node >= 0 and tree.depths[node] < task.max_depth:
            for rank, (prob, token, behind) in enumerate(children(expanded, task.width, seen)):
                left.append((-tree.scores[node] - math.log(prob), order, node, token, prob, rank, behind))
                order += 1
        if not left:
            break
        best = min(left, key=lambda head: head[:2])
        left.remove(best)
        _, _, parent, token, prob, rank, expanded = best
        node = task.add(tree, parent, token, prob, rank)
    return tree


def children(
    contexts: Seq[Context], width: int, seen: Callable[[Text, Text], Counts]
) -> list[tuple[float, int, list[Context]]]:
    """(chance, token, contexts behind it), by the formula of `Shares`."""
    rest, chances, behind = 1.0, dict[int, float](), dict[int, list[Context]]()
    for text, start in contexts:
        pattern, found = seen(text, start)
        total = sum(count for _, count in found)
        if not total:
            continue
        trust = rest * (1 - 1 / ((1 + 0.4 * len(pattern)) * total**0.7))
        for token, count in found:
            chance = trust * (count / total) ** 1.5
            rest -= chance
            chances[token] = chances.get(token, 0.0) + chance
            behind.setdefault(token, []).append((text, (*pattern, token)))
        if rest < 0.1:
            break
    best = sorted(chances, key=lambda token: -chances[token])[:width]
    return [(chances[token], token, behind[token]) for token in best]
