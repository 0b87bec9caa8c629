"""The self-test of a GPU against decoders that keep their promise, and some that do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specdec.models.device_decoder import DeviceDecoder, device_self_test
from tests.kernels.gpu.quick_interpreter import quick_interpreter
from tests.models.device.small import device_decoder, shape
from verify_kernels.forward_batch import PAGE_SIZE, ForwardBatch

Fault = Callable[["PathDecoder", ForwardBatch, int, float], float]


class PathDecoder:
    """A row's logits are a hash of the tokens on its path, found through the slots they were written to."""

    def __init__(self, fault: Fault, pages: int = 44, max_rows: int = 512, max_positions: int = 4096) -> None:
        self.config = SimpleNamespace(vocab_size=1000, n_layers=1)
        self.max_rows, self.max_logit_rows, self.max_positions = max_rows, 48, max_positions
        cache = torch.zeros(2, 1, pages, 1, PAGE_SIZE, 1)
        self.pool = SimpleNamespace(pages=pages, k=cache[0], v=cache[1])
        self.coarse: bool | None = None
        self.batches: list[tuple[int, int, bool | None]] = []
        self._fault = fault
        self._slots: dict[int, int] = {}

    def plan_coarsely(self, coarse: bool | None) -> None:
        self.coarse = coarse

    def forward(self, batch: ForwardBatch, logit_rows: Sequence[int]) -> Tensor:
        values = []
        assert batch.entry_ctx.shape == (1,)
        pages, ctx = batch.page_table[0], int(batch.entry_ctx[0])
        self.batches.append((batch.rows, ctx, self.coarse))
        for row in range(batch.rows):
            slot = self._slot(pages, ctx + row)
            self._slots[slot] = int(batch.tokens[row])
            self.pool.k.view(-1)[slot] = self._fault(self, batch, row, float(batch.tokens[row]))
        before = [self._slots.get(self._slot(pages, slot), 0) for slot in range(ctx)]
        for row in logit_rows:
            path, node = [], row
            while node >= 0:
                path.append(int(batch.tokens[node]))
                node = int(batch.parent[node])
            values.append(hash((*before, *reversed(path))) % 2**20)
        found = [self._fault(self, batch, row, value) for row, value in zip(logit_rows, values, strict=True)]
        return torch.tensor(found)[:, None]

    @staticmethod
    def _slot(pages: Any, slot: int) -> int:
        return int(pages[slot // PAGE_SIZE]) * PAGE_SIZE + slot % PAGE_SIZE


def sound(decoder: PathDecoder, batch: ForwardBatch, row: int, value: float) -> float:
    return value


def by_rows(decoder: PathDecoder, batch: ForwardBatch, row: int, value: float) -> float:
    return value + 1 if batch.rows > 128 else value


def by_branch(decoder: PathDecoder, batch: ForwardBatch, row: int, value: float) -> float:
    return value + 1 if row and batch.parent[row] != row - 1 else value


def by_place(decoder: PathDecoder, batch: ForwardBatch, row: int, value: float) -> float:
    return value + 1 if batch.page_table[0, 0] else value


def by_plan(decoder: PathDecoder, batch: ForwardBatch, row: int, value: float) -> float:
    return value + 1 if decoder.coarse and batch.entry_ctx[0] >= 1024 else value


def by_far_plan(decoder: PathDecoder, batch: ForwardBatch, row: int, value: float) -> float:
    return value + 1 if decoder.coarse and batch.entry_ctx[0] >= 3072 else value


def one_key(decoder: PathDecoder, batch: ForwardBatch, row: int, value: float) -> float:
    """A fault that logits need not show: only in one row's cache, and not of a row whose logits are compared."""
    return value + 1 if batch.rows > 128 and batch.entry_ctx[0] == 0 and row == 37 else value


@pytest.mark.parametrize(
    ("fault", "mode"),
    [(sound, "bitwise"), *((fault, "numerical") for fault in (by_rows, by_branch, by_place, by_plan, one_key))],
)
def test_a_dependence_on_the_batch_is_detected(fault: Fault, mode: str) -> None:
    decoder = PathDecoder(fault)
    assert device_self_test(cast(DeviceDecoder, decoder)) == mode
    assert decoder.coarse is None


def test_kernels_for_long_prompts_are_run() -> None:
    """More rows than any tile has, blocks of committed pages in coarse plans, pieces of an odd size; in little time."""
    decoder = PathDecoder(sound)
    device_self_test(cast(DeviceDecoder, decoder))
    assert any(rows > 128 for rows, _, _ in decoder.batches)
    assert any(rows > 100 and ctx >= 1024 and coarse for rows, ctx, coarse in decoder.batches)
    assert any(rows == 24 and ctx > 1024 and coarse is False for rows, ctx, coarse in decoder.batches)
    assert len(decoder.batches) < 90


def test_plans_of_a_longer_context_are_compared() -> None:
    for fault, mode in ((sound, "bitwise"), (by_far_plan, "numerical")):
        assert device_self_test(cast(DeviceDecoder, PathDecoder(fault, pages=49))) == mode


@pytest.mark.parametrize(
    ("pages", "max_rows", "max_positions"), [(1, 64, 4096), (2, 64, 4096), (9, 64, 4096), (44, 48, 100), (44, 512, 8)]
)
def test_limited_memory_shortens_the_test(pages: int, max_rows: int, max_positions: int) -> None:
    decoder = PathDecoder(sound, pages, max_rows, max_positions)
    assert device_self_test(cast(DeviceDecoder, decoder)) == "bitwise"
    assert max(rows + ctx for rows, ctx, _ in decoder.batches) <= min(max_positions, pages * PAGE_SIZE)


def test_the_kernels_pass() -> None:
    """In the interpreter, with a short prompt: plans, positions and pieces together."""
    with quick_interpreter():
        decoder = device_decoder(shape(n_layers=1), "fp16")
        assert device_self_test(decoder, prompt=70) == "bitwise"
