"""Incremental retokenisation of a sequence for a model of another vocabulary, and of its drafts for the target."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence as Seq
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from draft.growth import MASKED_LOGIT, Growth
from specdec.core.kv_cache import common_length
from specdec.models.fim import FimParser
from specdec.models.tokenizer import Tokenizer


class VocabularyBridge:
    """Maps tokens between two vocabularies. Twins are tokens of equal bytes; special tokens, of equal name.

    ``to_draft`` and ``to_target`` map ids; -1: no twin. target_size, draft_size: rows of the models' output tables; ids
    beyond a tokenizer's vocabulary have no twin.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int) -> None:
        self._target, self._draft = target, draft
        self.to_draft, self.to_target = [-1] * target_size, [-1] * draft_size
        twins: dict[tuple[bool, bytes], int] = {}
        for token in _by_use(draft, draft_size):
            key = (token in draft.special_ids, draft.token_bytes(token))
            if key[1]:
                twins.setdefault(key, token)
        for token in _by_use(target, target_size):
            twin = twins.get((token in target.special_ids, target.token_bytes(token)))
            if twin is not None and self.to_target[twin] < 0:
                self.to_draft[token], self.to_target[twin] = twin, token
        shared = [(t, d) for t, d in enumerate(self.to_draft) if d >= 0]
        self._target_ids = np.array([t for t, _ in shared], np.intp)
        self._draft_ids = np.array([d for _, d in shared], np.intp)
        self.spelled = lru_cache(maxsize=65536)(self._spelled)

    def translate(self, logits: Tensor, out: Tensor) -> Tensor:
        """The draft's logits [rows, draft vocabulary], from any device, by the target's ids, in the first rows of
        ``out``.

        out: float32 [>= rows, target vocabulary], from `buffer`; ids without a twin keep `MASKED_LOGIT`.
        """
        # numpy: torch would wake its thread pool, which takes longer than the copy
        source, into = logits.cpu().numpy(), out.numpy()
        for row in range(logits.shape[0]):
            into[row, self._target_ids] = source[row, self._draft_ids]
        return out[: logits.shape[0]]

    def buffer(self, rows: int) -> Tensor:
        """A buffer for `translate`, float32 [rows, target vocabulary]."""
        return torch.full((rows, len(self.to_draft)), MASKED_LOGIT)

    def _spelled(self, draft_token: int) -> tuple[int, ...]:
        """The target's tokens for a draft token without a twin.

        Empty if its bytes are no text, or if the target's tokenizer changes the text (another normal form).
        """
        if draft_token in self._draft.special_ids:
            return ()
        try:
            text = self._draft.token_bytes(draft_token).decode()
        except UnicodeDecodeError:
            return ()
        ids = self._target.encode_inside(text)
        return tuple(ids) if max(ids, default=0) < len(self.to_draft) else ()


def _by_use(tokenizer: Tokenizer, size: int) -> list[int]:
    """Tokens below ``size``. Of equal bytes, the one that texts are split into comes first."""
    return sorted(range(min(size, tokenizer.vocab_size)), key=lambda token: token in tokenizer.fallback_ids)


UNSTABLE_TOKENS = 8  # last tokens of the tail, which further text may change
MAX_TAIL_TOKENS = 32  # tokens encoded again with each extension; beyond that all but UNSTABLE_TOKENS become stable


class RetokenizedText:
    """``ids`` are the draft's tokens of the whole text so far; the first ``stable`` ones never change.

    Each extension encodes the tail again, so that a token that a boundary of the other vocabulary split becomes whole.
    Special tokens map to the draft's tokens of the same name or are dropped. A fill-in-the-middle prompt becomes plain
    text, suffix first and prefix last, which the draft continues. An incomplete character waits for its other bytes;
    ``whole`` is False meanwhile.

    prompt_tokens: tokens kept of a longer prompt: its last ones, at least so many and less than twice as many. The cut
    moves in steps, so that the next keystroke has the same beginning. 0: the whole prompt.
    """

    def __init__(
        self, target: Tokenizer, draft: Tokenizer, bridge: VocabularyBridge, prompt: Seq[int], prompt_tokens: int = 0
    ) -> None:
        self._target, self._draft, self._bridge = target, draft, bridge
        self.ids: list[int] = [draft.bos_id] if draft.bos_id is not None and draft.add_bos else []
        self.stable = len(self.ids)
        self._tail = ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        parts = FimParser(target).parts(prompt)
        ordered = parts.head + parts.suffix + parts.prefix + parts.middle
        # The target's begin token would be repeated if the draft's has the same name.
        begin = len(self.ids)
        self.extend(ordered[1:] if self.ids and ordered and bridge.to_draft[ordered[0]] == self.ids[0] else ordered)
        cut = (self.stable - begin) // prompt_tokens * prompt_tokens - prompt_tokens if prompt_tokens else 0
        if cut > 0:
            del self.ids[begin : begin + cut]
            self.stable -= cut

    @property
    def whole(self) -> bool:
        """Whether the text ends with a whole character."""
        return not self._utf8.getstate()[0]

    def extend(self, tokens: Seq[int]) -> int:
        """Append ``tokens`` of the target; returns the number of leading ids that did not change."""
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
        """Append text; returns as `extend`. final: an incomplete character will not be completed."""
        text = self._utf8.decode(data, final)
        if not text:
            return len(self.ids)
        self._tail += text
        before, fresh = self.ids[self.stable :], self._draft.encode(self._tail, add_special=False)
        self.ids[self.stable :] = fresh
        kept = self.stable + common_length(before, fresh)
        if len(fresh) > MAX_TAIL_TOKENS:
            self._stabilize(UNSTABLE_TOKENS)
        return kept

    def _stabilize(self, keep: int) -> None:
        """Make all but the last ``keep`` ids stable."""
        stable = max(self.stable, len(self.ids) - keep)
        # The tail must begin with a whole character.
        while stable > self.stable:
            try:
                self._tail = b"".join(self._draft.token_bytes(t) for t in self.ids[stable:]).decode()
                break
            except UnicodeDecodeError:
                stable -= 1
        self.stable = stable


NONCANONICAL_LOGPROB = math.log(0.1)  # added where a path splits text otherwise than the target's tokenizer; a guess


def add_canonical_path(growth: Growth, likelihoods: Seq[float], target: Tokenizer) -> None:
    """Add the likeliest path again as the target's tokenizer splits its text.

    The nodes at which the draft's split differs become less likely.

    likelihoods: the draft's log-probability of each own node of ``growth``.
    """
    tree = growth.tree
    leaf = _leaf(growth)
    if leaf == 0:
        return
    own = growth.path(leaf)[1:]
    nodes = tree.path(growth.anchors[leaf])
    spelled = [tree.tokens[node] for node in nodes]
    if not target.special_ids.isdisjoint(spelled):
        return
    data = b"".join(map(target.token_bytes, spelled))
    try:
        canonical = target.encode_inside(data.decode())
    except UnicodeDecodeError:
        return
    same = common_length(spelled, canonical)
    if same >= min(len(spelled), len(canonical)):
        return
    chances = _by_byte(growth, own, likelihoods, target)
    ends = list(accumulate(len(target.token_bytes(token)) for token in canonical))
    if not all(growth.permits(canonical[:i], canonical[i]) for i in range(same, len(canonical))):
        return  # the request's masks or bans exclude the canonical tokens
    _penalise(growth, nodes[same])
    parent = nodes[same - 1] if same else 0
    for token, begin, end in zip(canonical[same:], [0, *ends][same:], ends[same:], strict=False):
        parent = growth.task.add(tree, parent, token, math.exp(sum(chances[begin:end])))
        if parent < 0:
            return


def _leaf(growth: Growth) -> int:
    """The own node at the end of the path that follows the likeliest child from the root."""
    children: dict[int, list[int]] = {}
    for node in range(1, len(growth.tokens)):
        children.setdefault(growth.parents[node], []).append(node)
    node = 0
    while node in children:
        node = max(children[node], key=lambda n: growth.tree.scores[growth.anchors[n]])
    return node


def _by_byte(growth: Growth, own: Seq[int], likelihoods: Seq[float], target: Tokenizer) -> list[float]:
    """Log-probability of each byte of the path ``own``: a token's on its first byte, 0 on the others."""
    found: list[float] = []
    above = 0
    for node in own:
        path = growth.tree.path(growth.anchors[node])
        length = sum(len(target.token_bytes(growth.tree.tokens[n])) for n in path[above:])
        above = len(path)
        found += [likelihoods[node], *[0.0] * (length - 1)] if length else []
    return found


def _penalise(growth: Growth, first: int) -> None:
    """Lower the scores of ``first`` and its descendants, and exclude them from calibration."""
    tree = growth.tree
    below = {first}
    for node in range(first, len(tree)):
        if node == first or tree.parents[node] in below:
            below.add(node)
            tree.scores[node] += NONCANONICAL_LOGPROB
            tree.cells[node] = -1
