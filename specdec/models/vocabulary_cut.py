"""Cuts a draft model's output table to the most frequent tokens.

The idea of FR-Spec (arXiv 2502.14856): a small model spends a third of its time on logits of tokens that hardly ever
occur. Tokens that are cut are not drafted; the target may still choose them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.models.checkpoint import Checkpoint, StoredBlocks, TensorSource
from specdec.models.tokenizer import Tokenizer

_FOLDER = Path(__file__).parent / "token_frequencies"
_DIGEST_BYTES = 32  # SHA-256 at the head of a file: the tokenizer's fingerprint
_STEPS_PER_DOUBLING = 8.0  # resolution of the stored logarithms of frequencies
_RUN_ROWS = 4096  # of the whole table that are read at a time: rare tokens' ids lie far apart


def write_frequencies(path: Path, fingerprint: str, counts: NDArray[np.int64]) -> None:
    """Write how often each token was seen, for `most_frequent`: one byte of logarithm each, compressed.

    fingerprint: the tokenizer's.
    """
    levels = np.minimum(np.round(_STEPS_PER_DOUBLING * np.log2(1.0 + counts)), 255).astype(np.uint8)
    path.write_bytes(bytes.fromhex(fingerprint) + zlib.compress(levels.tobytes(), 9))


@dataclass(frozen=True, slots=True)
class VocabularyCut:
    """The tokens of a vocabulary that stay."""

    fingerprint: str  # of the tokenizer
    ids: NDArray[np.int32]  # rising


def most_frequent(fingerprint: str, count: int, size: int, folder: Path = _FOLDER) -> VocabularyCut | None:
    """The ``count`` most frequent tokens among the first ``size`` ids; at equal frequency the lower id first.

    None where frequencies are not known for the vocabulary, or where it has no more than ``count`` tokens.
    """
    digest = bytes.fromhex(fingerprint)
    for path in sorted(folder.glob("*.bin")):
        data = path.read_bytes()
        if data[:_DIGEST_BYTES] == digest:
            levels = np.frombuffer(zlib.decompress(data[_DIGEST_BYTES:]), np.uint8)[:size].astype(np.int32)
            if 0 < count < len(levels):
                kept = np.argsort(-levels, kind="stable")[:count]
                return VocabularyCut(fingerprint, np.sort(kept).astype(np.int32))
    return None


class CutCheckpoint(Checkpoint):
    """``checkpoint`` with an output table of the tokens ``ids`` alone."""

    def __init__(self, checkpoint: Checkpoint, ids: NDArray[np.int32]) -> None:
        self._checkpoint, self._ids = checkpoint, ids
        self.name, self.keeps_packed = checkpoint.name, checkpoint.keeps_packed
        self.path, self.place = checkpoint.path, checkpoint.place / f"top-{len(ids)}"

    def fingerprint(self) -> str:
        """Over the checkpoint's and the tokens kept."""
        return hashlib.sha256(self._checkpoint.fingerprint().encode() + self._ids.tobytes()).hexdigest()

    def open(self) -> CutSource:
        return CutSource(self._checkpoint.open(), self._ids)

    def tokenizer(self, cache_dir: Path) -> Tokenizer:
        return self._checkpoint.tokenizer(cache_dir)


class CutSource(TensorSource):
    """A source whose ``lm_head`` has the rows ``output_ids`` of that of ``inner``, or of its embedding."""

    def __init__(self, inner: TensorSource, output_ids: NDArray[np.int32]) -> None:
        self._inner, self.output_ids = inner, output_ids
        self._table = "embed" if inner.config.tie_embeddings else "lm_head"
        self.name = inner.name
        self.config = replace(inner.config, tie_embeddings=False, output_size=len(output_ids))

    def has(self, role: str) -> bool:
        """Whether the checkpoint holds ``role``; an output table's bias is none that any family has."""
        return role == "lm_head" or self._inner.has(role)

    def shape(self, role: str) -> tuple[int, ...]:
        if role == "lm_head":
            return len(self.output_ids), self._inner.shape(self._table)[1]
        return self._inner.shape(role)

    def rows(self, role: str, low: int, high: int) -> Tensor:
        return self._rows(self._inner.rows, role, low, high)

    def vector(self, role: str) -> Tensor:
        return self._inner.vector(role)

    def stored_blocks(self, role: str) -> StoredBlocks | None:
        return self._inner.stored_blocks(self._table if role == "lm_head" else role)

    def blocks(self, role: str, low: int, high: int) -> Tensor:
        return self._rows(self._inner.blocks, role, low, high)

    def _rows(self, read: Callable[[str, int, int], Tensor], role: str, low: int, high: int) -> Tensor:
        if role != "lm_head":
            return read(role, low, high)
        ids = self.output_ids[low:high]
        runs = np.split(ids, np.flatnonzero(np.diff(ids // _RUN_ROWS)) + 1)
        pieces = [
            read(self._table, int(run[0]), int(run[-1]) + 1)[torch.from_numpy(run - run[0]).long()] for run in runs
        ]
        return torch.cat(pieces)
