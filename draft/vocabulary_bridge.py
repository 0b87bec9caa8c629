"""Which tokens of two vocabularies mean the same bytes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from specdec.models.tokenizer import Tokenizer

DEAD = -1e31  # below what samplers take for a live logit


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
