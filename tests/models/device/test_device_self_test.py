"""The self-test of a GPU against decoders that keep their promise, and some that do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specdec.models.device.device_decoder import DeviceDecoder
from specdec.models.device.device_self_test import device_self_test
from verify_kernels.forward_batch import PAGE_SIZE, ForwardBatch

Fault = Callable[[ForwardBatch, int, float], float]


class PathDecoder:
    """A row's logits are a hash of the tokens on its path, found through the slots they were written to."""

    def __init__(self, fault: Fault) -> None:
        self.config = SimpleNamespace(vocab_size=1000)
        self.max_logit_rows = 48
        self._fault = fault
        self._slots: dict[int, int] = {}

    def forward(self, batch: ForwardBatch, logit_rows: Sequence[int]) -> Tensor:
        values = []
        assert batch.entry_ctx.shape == (1,)
        pages, ctx = batch.page_table[0], int(batch.entry_ctx[0])
        for row in range(batch.rows):
            self._slots[self._slot(pages, ctx + row)] = int(batch.tokens[row])
            path, node = [], row
            while node >= 0:
                path.append(int(batch.tokens[node]))
                node = int(batch.parent[node])
            before = [self._slots[self._slot(pages, slot)] for slot in range(ctx)]
            values.append(self._fault(batch, row, hash((*before, *reversed(path))) % 2**20))
        return torch.tensor(values)[:, None]

    @staticmethod
    def _slot(pages: Any, slot: int) -> int:
        return int(pages[slot // PAGE_SIZE]) * PAGE_SIZE + slot % PAGE_SIZE


def sound(batch: ForwardBatch, row: int, value: float) -> float:
    return value


def by_rows(batch: ForwardBatch, row: int, value: float) -> float:
    return value + 1 if batch.rows > 40 else value


def by_branch(batch: ForwardBatch, row: int, value: float) -> float:
    return value + 1 if row and batch.parent[row] != row - 1 else value


def by_place(batch: ForwardBatch, row: int, value: float) -> float:
    return value + 1 if batch.page_table[0, 0] else value


@pytest.mark.parametrize(
    ("fault", "mode"),
    [(sound, "bitwise"), (by_rows, "numerical"), (by_branch, "numerical"), (by_place, "numerical")],
)
def test_what_depends_on_company_is_found(fault: Fault, mode: str) -> None:
    assert device_self_test(cast(DeviceDecoder, PathDecoder(fault))) == mode
