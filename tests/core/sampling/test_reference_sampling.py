"""The reference sampler against torch and plain Python, since the native one is compared with it."""

from __future__ import annotations

import math
from dataclasses import Field, fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from tests.core.sampling.cases import policies
from verify_kernels.noise import gumbel
from verify_kernels.reference.sampling import ReferenceSampling, live, processed_logits, ranked
from verify_kernels.sampling import RowSampling, SamplingPolicy, SequenceEdits

REFERENCE = ReferenceSampling()


@pytest.mark.parametrize("field", [each for each in fields(SamplingPolicy) if each.init], ids=lambda each: each.name)
def test_the_cases_draw_every_field_of_a_policy(field: Field[Any]) -> None:
    try:
        find(policies(), lambda policy: getattr(policy, field.name) != field.default)
    except NoSuchExample:
        pytest.fail("draw it in tests/core/sampling/cases.py")


def survivors(z: list[float], **changes: float) -> list[int]:
    """Ids the filters keep of ``z``, best first."""
    return REFERENCE.filter(np.asarray(z, np.float32), SamplingPolicy(seed=0, **changes)).tolist()  # type: ignore[arg-type]


def test_top_k_keeps_exactly_k_and_breaks_ties_by_lower_id() -> None:
    assert survivors([1.0, 3.0, 1.0, 2.0, 1.0], top_k=3) == [1, 3, 0]
    assert survivors([0.0] * 6, top_k=2) == [0, 1]
    assert survivors([0.0, 1.0], top_k=10) == [1, 0]


def test_top_p_keeps_the_smallest_prefix_that_reaches_p() -> None:
    z = [math.log(p) for p in (0.125, 0.5, 0.25, 0.125)]
    assert survivors(z, top_p=0.5) == [1]
    assert survivors(z, top_p=0.51) == [1, 2]
    assert survivors(z, top_p=0.76) == [1, 2, 0]
    assert survivors(z, top_p=0.0) == [1]
    assert survivors([0.0] * 4, top_p=0.5) == [0, 1]


def test_top_p_counts_the_tokens_that_top_k_kept() -> None:
    z = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert survivors(z, top_p=0.56) == [0, 1]
    assert survivors(z, top_k=2, top_p=0.56) == [0]  # 0.4 of 0.7 is 0.571


def test_min_p_is_relative_to_the_best() -> None:
    z = [math.log(p) for p in (0.6, 0.29, 0.07, 0.04)]
    assert survivors(z, min_p=0.1) == [0, 1, 2]
    assert survivors(z, min_p=0.2) == [0, 1]
    assert survivors(z, min_p=1.0) == [0]


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.sampled_from([0.3, 0.9, 0.95, 0.99]), st.sampled_from([0, 5, 40]))
def test_filters_agree_with_torch(seed: int, p: float, k: int) -> None:
    z = np.random.default_rng(seed).standard_normal(300).astype(np.float32) * 3
    values, ids = torch.sort(torch.from_numpy(z).double(), stable=True, descending=True)
    keep = ids[:k] if k else ids
    cumulative = torch.softmax(values[: len(keep)], 0).cumsum(0)
    if bool(((cumulative - p).abs() < 1e-6).any()):
        return  # on the edge, where float32 exp may round to either side
    expected = keep[: int((cumulative < p).sum()) + 1]
    assert survivors(z.tolist(), top_p=p, top_k=k) == expected.tolist()


def test_sampling_is_the_argmax_of_z_plus_noise() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(0))
    policy = SamplingPolicy(seed=77, temperature=0.5)
    expected = int(np.argmax(logits[0].numpy() / np.float32(0.5) + gumbel(77, 12, np.arange(500))))
    assert REFERENCE.sample(logits, [RowSampling(policy, 12)]).tolist() == [expected]


def test_penalties_bias_and_masks_apply_in_order() -> None:
    policy = SamplingPolicy(seed=0, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    edits = SequenceEdits(
        bias_ids=np.asarray([0, 4], np.int32), bias_values=np.asarray([10.0, 1.0], np.float32),
        mask=np.asarray([0b111110], np.uint32), banned=np.asarray([5], np.int32), seen=[1, 2],
    )  # fmt: skip
    edits.add_output([2, 3])
    raw = np.asarray([0.0, 4.0, -4.0, 4.0, 4.0, 9.0, 7.0], np.float32)
    rows = [
        RowSampling(policy, 0, edits, edits.path_counts(path), ban) for path, ban in [((), True), ((3, 4, 3), False)]
    ]
    inf = -math.inf
    #                      masked, in the prompt, also output once, output once, biased, banned, beyond the mask
    assert processed_logits(raw, rows[0]).tolist() == [inf, 2.0, -8.75, 1.25, 5.0, inf, inf]
    assert processed_logits(raw, rows[1]).tolist() == [inf, 2.0, -8.75, 0.25, 2.25, 9.0, inf]
    assert raw.tolist() == [0.0, 4.0, -4.0, 4.0, 4.0, 9.0, 7.0]


def test_dead_logits_are_excluded_and_large_ones_count_as_1e30() -> None:
    row = np.asarray([np.nan, -np.inf, -1e30, 3e38, np.inf, 1.0, -9e29], np.float32)
    assert ranked(live(row)).tolist() == [3, 4, 5, 6]


def test_logprobs_are_log_softmax_best_first_lower_id_among_equals() -> None:
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(4)).round(decimals=1) * 4
    chosen, ids, values = REFERENCE.logprobs(logits, np.asarray([7, 8, 9], np.int32), 20)
    expected = torch.log_softmax(logits.double(), -1)
    best, order = torch.sort(expected, stable=True, dim=-1, descending=True)
    assert ids.tolist() == order[:, :20].tolist()
    assert np.allclose(values, best[:, :20], atol=1e-6)
    assert chosen == pytest.approx([float(expected[r, 7 + r]) for r in range(3)], abs=1e-6)


def test_childrens_logprobs_are_of_the_filtered_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]]))
    ids, values = REFERENCE.children(logits, [RowSampling(SamplingPolicy(seed=1, top_k=2), 0)], 4)
    found = {token: value for token, value in zip(ids[0].tolist(), values[0].tolist(), strict=True) if token >= 0}
    assert found == pytest.approx({0: math.log(2 / 3), 1: math.log(1 / 3)}, abs=1e-6)
    ids, values = REFERENCE.children(logits, [RowSampling(SamplingPolicy(seed=1, temperature=0), 0)], 3)
    assert ids[0].tolist() == [0, 1, 2]
    assert np.exp(values[0]) == pytest.approx([0.5, 0.25, 0.125], abs=1e-6)
