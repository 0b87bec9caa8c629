"""Puts a draft's likeliest path into the target's own tokenisation."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from itertools import accumulate

from draft.growth import Growth
from specdec.models.tokenizer import Tokenizer

UNUSUAL = math.log(0.1)  # how seldom a target says in two tokens what it has one for


def respell(growth: Growth, likelihoods: Seq[float], target: Tokenizer) -> None:
    """Add the path as the target's tokenizer would write the text of the deepest likely path, and believe less in the
    nodes at which the draft's way of spelling it parts from that.

    likelihoods: the draft's own log-probability of each own node of ``growth``.
    """
    tree = growth.tree
    leaf = _leaf(growth)
    if leaf == 0:
        return
    own = growth.path(leaf)[1:]
    nodes = tree.path(growth.anchors[leaf])
    pieces = [target.token_bytes(tree.tokens[node]) for node in nodes]
    if any(tree.tokens[node] in target.special_ids for node in nodes):
        return
    data = b"".join(pieces)
    try:
        canonical = target.encode(data.decode(), add_special=False)
    except UnicodeDecodeError:
        return
    spelled = [tree.tokens[node] for node in nodes]
    same = _common(spelled, canonical)
    if same >= min(len(spelled), len(canonical)):
        return
    chances = _by_byte(growth, own, likelihoods, target)
    ends = list(accumulate(len(target.token_bytes(token)) for token in canonical))
    if ends[-1] != len(data) or len(chances) < len(data):
        return
    if not all(growth.permits(canonical[:i], canonical[i]) for i in range(same, len(canonical))):
        return  # the request itself keeps the target from spelling it its own way
    _doubt(growth, nodes[same])
    parent = nodes[same - 1] if same else 0
    for token, begin, end in zip(canonical[same:], [0, *ends][same:], ends[same:], strict=False):
        parent = growth.task.add(tree, parent, token, math.exp(sum(chances[begin:end])))
        if parent < 0:
            return


def _leaf(growth: Growth) -> int:
    """The own node at the end of the path that goes, from the root, to the likeliest child each time."""
    children: dict[int, list[int]] = {}
    for node in range(1, len(growth.tokens)):
        children.setdefault(growth.parents[node], []).append(node)
    node = 0
    while node in children:
        node = max(children[node], key=lambda n: growth.tree.scores[growth.anchors[n]])
    return node


def _by_byte(growth: Growth, own: Seq[int], likelihoods: Seq[float], target: Tokenizer) -> list[float]:
    """The log-probability of each byte of the path: a token's lies on its first byte."""
    found: list[float] = []
    above = 0
    for node in own:
        path = growth.tree.path(growth.anchors[node])
        length = sum(len(target.token_bytes(growth.tree.tokens[n])) for n in path[above:])
        above = len(path)
        found += [likelihoods[node], *[0.0] * (length - 1)] if length else []
    return found


def _doubt(growth: Growth, first: int) -> None:
    """Lower ``first`` and all below it; what is proposed against better knowledge teaches calibration nothing."""
    tree = growth.tree
    below = {first}
    for node in range(first, len(tree)):
        if node == first or tree.parents[node] in below:
            below.add(node)
            tree.scores[node] += UNUSUAL
            tree.cells[node] = -1


def _common(one: Seq[int], other: Seq[int]) -> int:
    n = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        n += 1
    return n
