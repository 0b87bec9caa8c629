"""A language model small enough to enumerate: logits looked up by the last two tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class TableModel:
    """Float32 logits [vocab, vocab, vocab] drawn from a seed; ``spread`` is their standard deviation."""

    def __init__(self, vocab: int, seed: int, spread: float = 1.5) -> None:
        self.vocab = vocab
        rng = np.random.default_rng(seed)
        self.table = (rng.standard_normal((vocab, vocab, vocab)) * spread).astype(np.float32)

    def row(self, tokens: Sequence[int]) -> list[float]:
        """Logits after ``tokens`` (at least two)."""
        return [float(x) for x in self.table[tokens[-2], tokens[-1]]]

    def logits(self, contexts: Sequence[Sequence[int]]) -> Tensor:
        """Logits after each context; float32 [contexts, vocab]."""
        last = np.asarray([context[-2:] for context in contexts])
        return torch.from_numpy(self.table[last[:, 0], last[:, 1]])
