"""The GPU's sampler against the numpy oracle: every token equal, every log-probability bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.sampling.cases import Case, cases
from tests.kernels.gpu.reference import sampling as twin
from tests.kernels.gpu.sampling_rows import ManySplits, differences, hard_logits, row, same
from verify_kernels.gpu import sampling
from verify_kernels.gpu.sampling_math import divide, softmax_weight
from verify_kernels.gpu.sampling_table import (
    SamplingNeeds,
    SamplingPlan,
    SamplingPool,
    SamplingTable,
    SamplingWorkspace,
)
from verify_kernels.gpu.triton_sampling import TritonSampling
from verify_kernels.noise import softmax_weights
from verify_kernels.reference.sampling import ReferenceSampling
from verify_kernels.sampling import NO_TOKEN, RowSampling, SequenceEdits

FILTERS: list[dict[str, Any]] = [
    {}, {"top_p": 0.95}, {"top_k": 50}, {"top_k": 7, "top_p": 0.8, "min_p": 0.01}, {"min_p": 0.05, "temperature": 0.7},
    {"temperature": 0.0}, {"top_p": 0.0}, {"top_k": 900, "temperature": 1.7}, {"top_p": 1 - 1e-12},
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels(device: torch.device) -> TritonSampling:
    return TritonSampling(device)


def check(kernels: TritonSampling, case: Case, width: int) -> None:
    before = case.logits.numpy().tobytes()
    assert differences(kernels, case.logits, case.rows, width) == []
    assert case.logits.numpy().tobytes() == before


SMALL = cases().filter(lambda case: case.logits.shape[1] <= 1000)  # the interpreter takes its time
WIDTHS = st.sampled_from([1, 2, 3, 20])


@settings(max_examples=6)
@given(SMALL, WIDTHS)
def test_tokens_equal_the_oracles(kernels: TritonSampling, case: Case, width: int) -> None:
    check(kernels, case, width)


@settings(max_examples=3)
@given(SMALL, st.sampled_from([1, 5, 64]))
def test_tokens_do_not_depend_on_the_split_of_rows(device: torch.device, case: Case, width: int) -> None:
    check(TritonSampling(device, ManySplits), case, width)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=300)
@given(cases(), WIDTHS, st.booleans())
def test_many_rows(device: torch.device, case: Case, width: int, many: bool) -> None:
    check(TritonSampling(device, ManySplits if many and case.logits.shape[1] <= 1000 else SamplingPlan), case, width)


@pytest.mark.parametrize("at", range(len(FILTERS)), ids=lambda at: str(FILTERS[at]))
def test_hard_rows(device: torch.device, at: int) -> None:
    """A third of the rows for each of the filters, the next third for the next."""
    vocab, plan = (257, ManySplits) if at % 2 else (600, SamplingPlan)
    logits = torch.stack(list(hard_logits(vocab).values())[at % 3 :: 3])
    rows = [row(seed=2**63 + i, position=2**33 + i, **FILTERS[at]) for i in range(len(logits))]
    assert differences(TritonSampling(device, plan), logits, rows, 3, ("sample", "children")) == []


def test_hard_rows_unfiltered(kernels: TritonSampling) -> None:
    logits = torch.stack(list(hard_logits(100).values()))
    assert differences(kernels, logits, [row()] * len(logits), 20, ("sample", "greedy", "logprobs")) == []


@pytest.mark.parametrize(("vocab", "filters"), [(70_001, FILTERS[:4]), (262_208, FILTERS[1:2])])  # Gemma 3's
def test_a_real_vocabulary(vocab: int, filters: list[dict[str, Any]], kernels: TritonSampling) -> None:
    logits = torch.randn(len(filters), vocab, generator=torch.Generator().manual_seed(3)) * 6
    rows = [row(seed=i, **how) for i, how in enumerate(filters)]
    assert differences(kernels, logits, rows, 4) == []


def test_samples_of_a_flat_row(kernels: TritonSampling) -> None:
    """A bound that is too tight by a little loses a winner sometimes."""
    logits = torch.randn(1, 250, generator=torch.Generator().manual_seed(1)).expand(60, 250) * 0.1
    rows = [row(seed=5, position=position) for position in range(60)]
    assert differences(kernels, logits, rows, 1, ("sample",)) == []


def test_a_row_keeps_its_results_in_any_batch(kernels: TritonSampling) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2))
    rows = [row(seed=i, **how) for i, how in enumerate(FILTERS[1:5])]
    whole, (ids, values) = kernels.sample(logits, rows), kernels.children(logits, rows, 4)
    for i in range(4):
        alone = logits[i : i + 1]
        assert kernels.sample(alone, rows[i : i + 1]).tolist() == whole[i : i + 1].tolist()
        assert same(kernels.children(alone, rows[i : i + 1], 4), (ids[i : i + 1], values[i : i + 1]))


def edited_rows(vocab: int) -> list[RowSampling]:
    """Two sequences with all edits; of the first two nodes, one with its own grammar mask."""
    rng = np.random.default_rng(4)
    rows = []
    for seed in (1, 2):
        edits = SequenceEdits(
            bias_ids=np.asarray([3, 9, 5, vocab + 5, 11], np.int32),  # one that there is not
            bias_values=np.asarray([0.7, -1.0, 1e-7, 1.0, 1e30], np.float32),
            mask=rng.integers(0, 2**32, vocab // 32, dtype=np.uint32) | np.uint32(0xFFFF),
            banned=np.asarray([11, 4], np.int32),
            seen=rng.integers(0, vocab, 400).tolist(),
        )
        edits.add_output(rng.integers(0, 40, 30).tolist())
        policy = row(seed=seed, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1, top_k=40).policy
        path = edits.path_counts([5, 9, 5])
        rows += [RowSampling(policy, 20, edits, (), True), RowSampling(policy, 23, edits, path, False)]
    mask = rng.integers(0, 2**32, vocab // 32, dtype=np.uint32)
    return [*rows, rows[1]._replace(mask=mask), RowSampling(row(temperature=0.0).policy, 3)]


def test_edits_equal_the_oracles_and_leave_no_trace(device: torch.device, kernels: TritonSampling) -> None:
    rows = edited_rows(320)
    logits = torch.randn(len(rows), 320, generator=torch.Generator().manual_seed(6))
    logits[:, 9] = torch.nan
    logits[:, 3] = 3e38
    kept = logits.numpy().tobytes()
    assert differences(kernels, logits, rows, 5) == []
    table, there = SamplingTable.of(rows, device), logits.to(device)
    workspace = SamplingWorkspace.allocate(len(rows), SamplingPlan.of(320), device)
    sampling.sample(there, table, SamplingNeeds.of(rows), workspace, torch.zeros(6, dtype=torch.int32, device=device))
    assert there.cpu().numpy().tobytes() == kept


class LastingTable:
    """A table of ``rows`` rows that takes batch after batch."""

    def __init__(self, rows: int, device: torch.device) -> None:
        words = SamplingTable.words(rows) + 4000
        self._there, self._here = (torch.zeros(words, dtype=torch.int32, device=place) for place in (device, "cpu"))
        self.table = SamplingTable.within(rows, self._there, self._here, torch.zeros(4000, device=device))

    def fill(self, rows: list[RowSampling]) -> SamplingNeeds:
        used = self.table.write(rows, SamplingPool(rows))
        self._there[:used].copy_(self._here[:used])
        return SamplingNeeds.of(rows)


def test_the_twin_reads_the_table_like_the_kernels(device: torch.device) -> None:
    rows = edited_rows(320)
    logits = torch.randn(8, 320, generator=torch.Generator().manual_seed(7)).to(device)
    lasting = LastingTable(8, device)
    table, needs = lasting.table, lasting.fill(rows)
    workspace = SamplingWorkspace.allocate(8, SamplingPlan.of(320), device)
    results = []
    for module in (sampling, twin):
        tokens, ids = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((8,), (8, 3)))
        values, best = (torch.zeros(8, 3, dtype=torch.float64, device=device) for _ in range(2))
        chosen, best_ids = torch.zeros(8, dtype=torch.float64, device=device), torch.zeros_like(ids)
        module.sample(logits, table, needs, workspace, tokens)
        module.children(logits, table, needs, workspace, ids, values)
        module.logprobs(logits, tokens, workspace, chosen, best_ids, best)
        results.append([t.cpu().numpy() for t in (tokens, ids, values, chosen, best_ids, best)])
    assert same(*results)
    assert results[0][0][6:].tolist() == [NO_TOKEN, NO_TOKEN]  # inert
    assert results[0][1][6:].max() == NO_TOKEN


def test_a_table_serves_batch_after_batch(device: torch.device) -> None:
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(8))
    lasting = LastingTable(4, device)
    workspace = SamplingWorkspace.allocate(4, SamplingPlan.of(200), device)
    everything = SamplingNeeds(noise=True, filters=True, edits=True, masks=True)
    for rows in (edited_rows(192)[4:], [row(seed=9)], [row(seed=i, top_k=3) for i in range(4)]):
        needs = lasting.fill(rows)
        for used in (needs, everything):  # more than is needed changes nothing
            tokens = torch.zeros(4, dtype=torch.int32, device=device)
            sampling.sample(logits.to(device), lasting.table, used, workspace, tokens)
            expected = ReferenceSampling().sample(logits[: len(rows)], rows).tolist()
            assert tokens.tolist() == expected + [NO_TOKEN] * (4 - len(rows))
    assert needs != everything


def test_positions_may_be_written_on_the_device(device: torch.device) -> None:
    logits = torch.zeros(3, 500)
    table = SamplingTable.of([row(position=0)] * 3, device)
    workspace = SamplingWorkspace.allocate(3, SamplingPlan.of(500), device)
    table.position.add_(torch.arange(3, device=device) + 2**40)
    tokens = torch.zeros(3, dtype=torch.int32, device=device)
    sampling.sample(logits.to(device), table, SamplingNeeds(noise=True), workspace, tokens)
    rows = [row(position=2**40 + i) for i in range(3)]
    assert tokens.tolist() == ReferenceSampling().sample(logits, rows).tolist()


@triton.jit
def arithmetic_kernel(x, inverse, quotient, distance, weight, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(quotient + at, divide(tl.load(x + at, mask=at < n), tl.load(inverse + at, mask=at < n)), mask=at < n)
    tl.store(weight + at, softmax_weight(tl.load(distance + at, mask=at < n)), mask=at < n)


def test_division_and_weights_equal_the_cpus(device: torch.device) -> None:
    rng, n = np.random.default_rng(9), 200_000
    anything = rng.integers(0, 2**32, n - 20_000, dtype=np.uint32).view(np.float32)
    ties = (rng.integers(-(2**24), 2**24, 20_000) * 2.0**-149).astype(np.float32)  # their quotients lie between two
    x = np.concatenate([anything, ties])
    x = np.where(np.abs(x) < 1e30, x, np.float32(-np.inf)).astype(np.float32)
    divisor = np.where(rng.random(n) < 0.5, 10 ** rng.uniform(-6, 6, n), rng.integers(1, 200, n)).astype(np.float32)
    distance = -np.abs(rng.standard_normal(n) * 15).astype(np.float32)
    distance[:3] = 0.0, -0.0, -np.inf
    quotient, weight = torch.zeros(n, device=device), torch.zeros(n, dtype=torch.int64, device=device)
    inputs = [torch.from_numpy(a).to(device) for a in (x, 1 / divisor.astype(np.float64), distance)]
    block = 1024 if device.type == "cuda" else 65536  # a program's registers; the interpreter is slow by programs
    grid = (triton.cdiv(n, block),)
    arithmetic_kernel[grid](*inputs[:2], quotient, inputs[2], weight, n, BLOCK=block, enable_fp_fusion=False)
    assert quotient.cpu().numpy().tobytes() == (x / divisor).tobytes()
    assert weight.cpu().numpy().tobytes() == softmax_weights(distance).tobytes()


def test_a_too_large_vocabulary_is_rejected() -> None:
    assert SamplingPlan.of(2**19 - 1).splits == 128
    with pytest.raises(ValueError, match="524288 columns"):
        SamplingPlan.of(2**19)


def test_no_rows_are_no_work(kernels: TritonSampling) -> None:
    nothing = torch.zeros(0, 10)
    assert kernels.sample(nothing, []).shape == (0,)
    assert kernels.children(nothing, [], 3)[0].shape == (0, 3)
    assert kernels.logprobs(torch.zeros(2, 10), np.zeros(2, np.int32), 0)[0].shape == (2,)


def test_log_probabilities_of_tokens_need_no_best_ones(kernels: TritonSampling) -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(8))
    assert differences(kernels, logits, [row(temperature=0.0)] * 3, 0, ("logprobs",)) == []
