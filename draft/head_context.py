"""What a feature head knows of one sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.kv_cache.page_key import PAGE_SIZE, page_key, root_key
from specdec.sequence import Sequence


@dataclass(slots=True)
class HeadContext:
    """Slots from ``64 * first_page`` to ``filled`` hold head KV; features of the ``n_pending`` positions after them
    wait in ``pending`` (float32 [n, width] each). ``root``: x of slot ``filled - 1``, when this context computed it.
    ``keys``: page keys of the sequence's tokens. ``n_told``: pages the book of pages was told of.
    """

    first_page: int = 0
    filled: int = 0
    pending: list[Tensor] = field(default_factory=list)
    n_pending: int = 0
    root: Tensor | None = None
    keys: list[bytes] = field(default_factory=list)
    n_told: int = 0

    @property
    def known(self) -> int:
        """The first position whose features were not given yet."""
        return self.filled + self.n_pending

    def restart(self, first_page: int, filled: int) -> None:
        """Positions were skipped: begin again, with KV of the slots from ``first_page`` on to ``filled``."""
        self.first_page, self.filled, self.n_told = first_page, filled, filled // PAGE_SIZE
        self.pending, self.n_pending, self.root = [], 0, None

    def append(self, rows: Tensor) -> None:
        """Features of the next positions; copied."""
        self.pending.append(rows.clone())
        self.n_pending += rows.shape[0]

    def take(self, n: int) -> Tensor:
        """The first ``n`` pending features, removed."""
        rows = self.pending[0] if len(self.pending) == 1 else torch.cat(self.pending)
        self.pending = [rows[n:]] if n < self.n_pending else []
        self.n_pending -= n
        return rows[:n]

    def keys_to(self, sequence: Sequence, n_pages: int) -> Seq[bytes]:
        """Keys of the first ``n_pages`` pages of the sequence's tokens."""
        while len(self.keys) < n_pages:
            start = len(self.keys) * PAGE_SIZE
            previous = self.keys[-1] if self.keys else root_key(sequence.salt)
            self.keys.append(page_key(previous, sequence.tokens[start : start + PAGE_SIZE]))
        return self.keys[:n_pages]
