"""Incremental retokenisation: a sequence's text in another model's tokens, and drafts in the target's tokens again."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence as Seq
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from draft.model import DEAD, Growth
from draft.reading_order import ReadingOrder
from specdec.models.tokenizer import Tokenizer


class VocabularyBridge:
    """Twins are tokens of equal bytes, special ones of equal name. ``to_draft`` and ``to_target`` map ids, -1 where
    there is no twin.

    target_size, draft_size: rows of the models' output tables; ids beyond a tokenizer's vocabulary have no twin.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int) -> None:
        self._target, self._draft = target, draft
        self.to_draft, self.to_target = [-1] * target_size, [-1] * draft_size
        twins: dict[tuple[bool, bytes], int] = {}
        for token in range(min(draft_size, draft.vocab_size)):
            key = (token in draft.special_ids, draft.token_bytes(token))
            if key[1]:
                twins.setdefault(key, token)
        for token in range(min(target_size, target.vocab_size)):
            twin = twins.get((token in target.special_ids, target.token_bytes(token)))
            if twin is not None and self.to_target[twin] < 0:
                self.to_draft[token], self.to_target[twin] = twin, token
        shared = [(t, d) for t, d in enumerate(self.to_draft) if d >= 0]
        self._target_ids = np.array([t for t, _ in shared], np.intp)
        self._draft_ids = np.array([d for _, d in shared], np.intp)
        self._spell = lru_cache(maxsize=65536)(self._spelled)

    @property
    def shared(self) -> int:
        """How many tokens have a twin."""
        return len(self._target_ids)

    def translate(self, logits: Tensor, out: Tensor) -> Tensor:
        """The draft's logits [rows, draft vocabulary] under the target's ids, in the first rows of ``out`` (float32
        [>= rows, target vocabulary], `DEAD` where there is no twin, as `buffer` makes it)."""
        # numpy, since torch wakes its own thread pool for this and waits for it longer than the copy takes
        source, into = logits.numpy(), out.numpy()
        for row in range(logits.shape[0]):
            into[row, self._target_ids] = source[row, self._draft_ids]
        return out[: logits.shape[0]]

    def buffer(self, rows: int) -> Tensor:
        """What `translate` writes to."""
        return torch.full((rows, len(self.to_draft)), DEAD)

    def spelled(self, draft_token: int) -> tuple[int, ...]:
        """The target's tokens for a draft token without a twin; none where its bytes are no text, or
        the target writes another text for it (a space in front, another normal form)."""
        return self._spell(draft_token)

    def _spelled(self, draft_token: int) -> tuple[int, ...]:
        if draft_token in self._draft.special_ids:
            return ()
        try:
            text = self._draft.token_bytes(draft_token).decode()
        except UnicodeDecodeError:
            return ()
        ids = self._target.encode(text, add_special=False)
        same = b"".join(self._target.token_bytes(token) for token in ids) == self._draft.token_bytes(draft_token)
        return tuple(ids) if same and max(ids, default=0) < len(self.to_draft) else ()


def best_tokens(logits: Tensor) -> list[tuple[int, float]]:
    """The likeliest token of each row and its probability."""
    values = logits.numpy()
    best = values.argmax(axis=1)
    top = values[np.arange(len(best)), best]
    chances = 1.0 / np.exp(values - top[:, None]).sum(axis=1)
    return list(zip(best.tolist(), chances.tolist(), strict=True))


SETTLED = 8  # tokens from the end that text to come may still change
LONGEST_TAIL = 32


class RetokenizedText:
    """``ids`` are the draft's tokens of the whole text so far. Text is encoded anew from a little before its end, so
    a token cut in two by a boundary of the other vocabulary mends itself; ``stable`` leading ids never change.

    Special tokens keep their meaning where the draft knows one of that name, else they are left out. A
    fill-in-the-middle prompt is put in reading order, suffix first and prefix last: the draft just continues. A
    character of which only some bytes have come waits; ``whole`` tells whether none does.

    ``reads``: of a longer prompt only the last tokens are taken, at least ``reads`` of them and less than twice as
    many; the cut moves in steps, so that the next keystroke finds the same beginning. 0: all of it.
    """

    def __init__(
        self, target: Tokenizer, draft: Tokenizer, bridge: VocabularyBridge, prompt: Seq[int], reads: int = 0
    ) -> None:
        self._target, self._draft, self._bridge = target, draft, bridge
        self.ids: list[int] = [draft.bos_id] if draft.bos_id is not None and draft.add_bos else []
        self.stable = len(self.ids)
        self._tail = ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        parts = ReadingOrder(target).parts(prompt)
        ordered = parts.head + parts.suffix + parts.prefix + parts.middle
        # The target's own begin token would be said twice where both call it by the same name.
        begin = len(self.ids)
        self.extend(ordered[1:] if self.ids and ordered and bridge.to_draft[ordered[0]] == self.ids[0] else ordered)
        cut = (self.stable - begin) // reads * reads - reads if reads else 0
        if cut > 0:
            del self.ids[begin : begin + cut]
            self.stable -= cut

    @property
    def whole(self) -> bool:
        """Whether the text ends with a whole character."""
        return not self._utf8.getstate()[0]

    def extend(self, tokens: Seq[int]) -> int:
        """More of the target's tokens; returns how many leading ids stayed as they were."""
        kept = len(self.ids)
        pieces: list[bytes] = []
        for token in tokens:
            if token in self._target.special_ids:
                kept = min(kept, self._append(b"".join(pieces), final=True))
                pieces.clear()
                self._stabilize(0)
                twin = self._bridge.to_draft[token]
                if twin >= 0:
                    self.ids.append(twin)
                    self.stable = len(self.ids)
            else:
                pieces.append(self._target.token_bytes(token))
        return min(kept, self._append(b"".join(pieces)))

    def _append(self, data: bytes, final: bool = False) -> int:
        """``final``: a character that has only begun will not be completed."""
        text = self._utf8.decode(data, final)
        if not text:
            return len(self.ids)
        self._tail += text
        before, fresh = self.ids[self.stable :], self._draft.encode(self._tail, add_special=False)
        same = 0
        for one, other in zip(before, fresh, strict=False):
            if one != other:
                break
            same += 1
        self.ids[self.stable :] = fresh
        kept = self.stable + same
        if len(fresh) > LONGEST_TAIL:
            self._stabilize(SETTLED)
        return kept

    def _stabilize(self, keep: int) -> None:
        """Only the last ``keep`` ids, and the text they stand for, remain open."""
        stable = max(self.stable, len(self.ids) - keep)
        # A character spread over several tokens must not be torn: settle a little less then.
        while stable > self.stable:
            try:
                self._tail = b"".join(self._draft.token_bytes(t) for t in self.ids[stable:]).decode()
                break
            except UnicodeDecodeError:
                stable -= 1
        self.stable = stable


UNUSUAL = math.log(0.1)  # how seldom a target says in two tokens what it has one for


def add_canonical_path(growth: Growth, likelihoods: Seq[float], target: Tokenizer) -> None:
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
