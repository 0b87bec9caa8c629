"""The native sampler against its brute-force twin, and against itself in other batches. Equality is bitwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis.errors import NoSuchExample

from specdec.core.sampling import Sampler
from tests.core.sampling.cases import Case, cases
from tests.core.sampling.natives import broken_native, native_sampling, portable_native
from verify_kernels.cpu.native_backend import NativeSampling
from verify_kernels.reference.sampling import ReferenceSampling
from verify_kernels.sampling import NO_TOKEN, RowSampling, SamplingKernels, SamplingPolicy

WIDTHS = (1, 3, 20)


def everything(kernels: SamplingKernels, case: Case) -> list[bytes]:
    """Return all outputs of a kernel set for a case, as bytes."""
    tokens = kernels.sample(case.logits, case.rows)
    results = [tokens]
    for width in WIDTHS:
        results += kernels.children(case.logits, case.rows, width)
        results += kernels.logprobs(case.logits, tokens, width)
    return [np.ascontiguousarray(result).tobytes() for result in results]


def differs(kernels: SamplingKernels, case: Case) -> bool:
    """Whether ``kernels`` and the reference disagree anywhere on a case."""
    return everything(kernels, case) != everything(ReferenceSampling(), case)


@settings(max_examples=400)
@given(cases())
def test_native_equals_the_reference(case: Case) -> None:
    assert not differs(native_sampling(), case)


def test_another_processor_gives_the_same_bits(tmp_path: Path) -> None:
    """Built without this machine's vector instructions: a seed must mean the same text there."""
    portable = portable_native(tmp_path)

    @settings(max_examples=100)
    @given(cases())
    def compare(case: Case) -> None:
        assert not differs(portable, case)

    compare()


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize(
    "changes",
    [{}, {"top_p": 0.95}, {"top_k": 50}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.05}, {"temperature": 0.0}],
    ids=str,
)
def test_native_equals_the_reference_on_a_real_vocabulary(scale: float, changes: dict[str, float]) -> None:
    logits = torch.randn(2, 151_936, generator=torch.Generator().manual_seed(3)) * scale
    rows = [RowSampling(SamplingPolicy(seed=i, **changes), 1000 + i) for i in range(2)]  # type: ignore[arg-type]
    assert not differs(native_sampling(), Case(logits, rows))


def test_short_cuts_find_the_brute_force_winner_many_times() -> None:
    """Three thousand unfiltered draws over 2,000 tokens: a bound too tight by a little loses a winner sometimes."""
    logits = torch.randn(1, 2000, generator=torch.Generator().manual_seed(1)).expand(3000, 2000)
    rows = [RowSampling(SamplingPolicy(seed=5), position) for position in range(3000)]
    native, reference = native_sampling().sample(logits, rows), ReferenceSampling().sample(logits, rows)
    assert native.tolist() == reference.tolist()


@settings(max_examples=40)
@given(cases())
def test_a_row_does_not_depend_on_the_others_nor_on_threads(case: Case) -> None:
    native, many = native_sampling(), native_sampling(threads=3)
    whole = many.sample(case.logits, case.rows).tolist()
    ids, values = many.children(case.logits, case.rows, 5)
    chosen, top_ids, top_values = many.logprobs(case.logits, np.asarray(whole, np.int32), 5)
    for r, row in enumerate(case.rows):
        alone = case.logits[r : r + 1]
        token = native.sample(alone, [row])
        one_ids, one_values = native.children(alone, [row], 5)
        one_chosen, one_top, one_top_values = native.logprobs(alone, token, 5)
        assert token.tolist() == whole[r : r + 1]
        assert (one_ids.tobytes(), one_values.tobytes()) == (ids[r].tobytes(), values[r].tobytes())
        assert one_chosen.tobytes() == chosen[r].tobytes()
        assert (one_top.tobytes(), one_top_values.tobytes()) == (top_ids[r].tobytes(), top_values[r].tobytes())


def test_rows_may_be_strided() -> None:
    padded = torch.randn(4, 500, generator=torch.Generator().manual_seed(0))
    rows = [RowSampling(SamplingPolicy(seed=9, top_p=0.9), 3)] * 4
    native = native_sampling()
    apart, together = padded[:, :300], padded[:, :300].contiguous()
    assert native.sample(apart, rows).tolist() == native.sample(together, rows).tolist()


def test_the_first_child_is_the_sampled_token() -> None:
    logits = torch.randn(200, 300, generator=torch.Generator().manual_seed(2)) * 2
    rows = [RowSampling(SamplingPolicy(seed=r, top_k=20, temperature=0.8), r) for r in range(200)]
    for kernels in (native_sampling(), ReferenceSampling()):
        ids, _ = kernels.children(logits, rows, 3)
        assert ids[:, 0].tolist() == kernels.sample(logits, rows).tolist()


@pytest.mark.parametrize("make", [native_sampling, ReferenceSampling])
def test_a_row_of_dead_logits_has_no_token(make: Callable[[], SamplingKernels]) -> None:
    kernels = make()
    logits = torch.stack([torch.full((70,), torch.nan), torch.full((70,), -torch.inf), torch.zeros(70)])
    for temperature in (0.0, 1.0):
        rows = [RowSampling(SamplingPolicy(seed=0, temperature=temperature, top_p=0.9), 0)] * 3
        tokens = kernels.sample(logits, rows)
        assert tokens[:2].tolist() == [NO_TOKEN, NO_TOKEN]
        assert tokens[2] != NO_TOKEN
        sampled = Sampler(kernels).sample(logits, rows, [2, 2, None])  # no row with a token wants them
        assert sampled == [(NO_TOKEN, None), (NO_TOKEN, None), (tokens[2], None)]


MUTANTS = {
    "noise bound too tight": ("sampling_scan.h", "* 1.001 * 0x1p32 + 2.0", "* 0.9 * 0x1p32"),
    "largest noise too small": ("sampling_scan.h", "LARGEST_NOISE = 23.0", "LARGEST_NOISE = 4.0"),
    "highest id wins ties": ("sampling_scan.h", "token < id[n - 1]))) return", "token > id[n - 1]))) return"),
    "noise of the next lane": ("sampling_scan.h", "bits[v & 3][(v >> 2) & 15]", "bits[(v + 1) & 3][(v >> 2) & 15]"),
    "top-k one too many": ("sampling_filter.h", "c.resize(row.top_k);\n      cut", "cut"),
    "top-k loses a tie": ("sampling_filter.h", "token <= id)", "token < id)"),
    "top-p one too few": ("sampling_filter.h", "if ((double)sum >= need) {", "if ((double)sum > need * 0.99) {"),
    "top-p of the unfiltered": (
        "sampling_filter.h",
        "for (const Candidate& one : c) total += weight_of(one, z_max);",
        "total = total_weight(view, Cut());",
    ),
    "min-p dropped": ("sampling_filter.h", "return floor > cut.z ?", "return false ?"),
    "temperature dropped": ("sampling_view.h", "temperature > 0 ? temperature : 1.0f", "1.0f"),
    "path penalties dropped": ("sampling_view.h", "penalised(live(raw[v]), path[2 * i + 1], row)", "z[v]"),
    "mask shifted": ("sampling_view.h", "bits >> i & 1 ?", "bits >> (31 - i) & 1 ?"),
}


QUICK = ("noise bound too tight", "highest id wins ties", "top-p one too few", "path penalties dropped")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MUTANTS])
def test_broken_native_kernels_are_caught(name: str, tmp_path: Path) -> None:
    broken: NativeSampling = broken_native(tmp_path, *MUTANTS[name])
    search = settings(max_examples=2000, phases=[Phase.generate], database=None)
    try:
        caught = find(cases(), lambda case: differs(broken, case), settings=search)
    except NoSuchExample:
        caught = None
    assert caught is not None, f"no case tells the mutant {name!r} from the reference"
