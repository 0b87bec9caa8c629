"""Steps arrive padded and otherwise unchanged, at stable addresses."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.models.device_step import POOL_WORDS, StepBuffer, StepTiers
from tests.models.device.small import place
from verify_kernels.forward_batch import BatchEntry, ForwardBatch
from verify_kernels.sampling import RowSampling, SamplingPolicy, SequenceEdits

MOVES: list[int] = []
BUFFER = StepBuffer(StepTiers(5, 40, 30, 9), place(), lambda: MOVES.append(1))
NOTHING = np.zeros(0, np.int32)


@st.composite
def entries(draw: st.DrawFn) -> BatchEntry:
    n = draw(st.integers(1, 8))
    parents = [-1, *(draw(st.integers(0, i - 1)) for i in range(1, n))]
    ctx = draw(st.integers(0, 300))
    pages = draw(st.lists(st.integers(0, 40), min_size=-(-(ctx + n) // 64), max_size=9))
    return BatchEntry(draw(st.lists(st.integers(0, 99), min_size=n, max_size=n)), parents, ctx, pages)


def edited(words: int) -> SequenceEdits:
    mask = np.arange(words, dtype=np.uint32)
    return SequenceEdits(NOTHING, np.zeros(0, np.float32), mask, NOTHING, ())


@settings(max_examples=40)
@given(st.lists(entries(), min_size=1, max_size=5), st.data())
def test_a_step_is_padded(given_entries: list[BatchEntry], data: st.DataObject) -> None:
    batch = ForwardBatch.build(given_entries)
    wanted = sorted(data.draw(st.sets(st.integers(0, batch.rows - 1), max_size=30)))
    roots = [data.draw(st.integers(-1, len(entry.tokens) - 1)) for entry in given_entries]
    firsts = list(range(len(given_entries)))
    samplings = [
        RowSampling(SamplingPolicy(seed=row, temperature=0.5 * (row % 2)), 10 + row, edited(3), (), False)
        for row in wanted
    ]
    step = BUFFER.load(batch, wanted, roots, firsts)
    n, b, m, tier = batch.rows, len(given_entries), len(wanted), step.tier
    for name, expected, padding in (
        ("tokens", batch.tokens, 0), ("parent", batch.parent, -1), ("depth", batch.depth, 0),
        ("entry_of", batch.entry_of, -1), ("entry_start", batch.entry_start, n), ("entry_ctx", batch.entry_ctx, 0),
        ("root_row", roots, -1), ("sample_start", firsts, 0), ("logit_rows", wanted, 0),
    ):  # fmt: skip
        there = getattr(step, name)
        assert there.data_ptr() % 16 == 0
        assert there.tolist() == [*list(expected), *[padding] * (len(there) - len(expected))], name
    pages = batch.page_table.shape[1]
    assert step.page_table.shape == (tier.entries, tier.pages)
    assert torch.equal(step.page_table[:b, :pages].cpu(), torch.from_numpy(batch.page_table))
    assert not step.page_table[:b, pages:].any()
    assert not step.page_table[b:].any()
    if wanted:
        table, needs = BUFFER.load_table(tier.samples, samplings)
        assert needs.masks
        assert table.seed[:m].tolist() == wanted
        assert table.position[:m].tolist() == [10 + row for row in wanted]
        assert (table.temperature[m:] < 0).all()
        begin = int(table.mask_begin[m - 1])
        assert table.pool[begin : begin + 3].tolist() == [0, 1, 2]


def test_addresses_are_stable_until_lists_outgrow_them() -> None:
    batch = ForwardBatch.build([BatchEntry([1], [-1], 0, [0])])

    def addresses(words: int) -> list[int]:
        sampling = RowSampling(SamplingPolicy(seed=1), 1, edited(words))
        step, (table, _) = BUFFER.load(batch, [0], [0], [0]), BUFFER.load_table(1, [sampling])
        assert table.pool[:words].tolist() == list(range(words))
        return [step.tokens.data_ptr(), step.page_table.data_ptr(), table.pool.data_ptr()]

    first = addresses(3)
    assert addresses(5) == first
    assert not MOVES
    moved = addresses(POOL_WORDS + 1)
    assert MOVES
    assert [address == before for address, before in zip(moved, first, strict=True)] == [True, True, False]
    assert addresses(POOL_WORDS + 1) == moved
