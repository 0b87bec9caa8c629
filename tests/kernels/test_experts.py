"""Layers of experts: against their torch twin, and against themselves in other batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.natives import native_backend
from tests.kernels.test_quant_linear import raw_blocks
from verify_kernels.backend import Backend, ExpertsSpec
from verify_kernels.packed_weights import PackedLinear, pack_block_linear, pack_linear
from verify_kernels.quant_formats import FORMATS
from verify_kernels.reference.backend import ReferenceBackend

EXPERTS, CHOSEN, HIDDEN, FFN = 6, 3, 256, 512
MAX_ROWS = 450


def packed(kind: str, n: int, k: int) -> PackedLinear:
    if kind in FORMATS:
        return pack_block_linear(torch.from_numpy(raw_blocks(kind, n, k)), None, kind, k)  # type: ignore[arg-type]
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n)) * k**-0.5
    return pack_linear(weight, None, kind)  # type: ignore[arg-type]


def make_spec(kind: str, *, normalise: bool = True, activation: str = "silu") -> ExpertsSpec:
    generator = torch.Generator().manual_seed(5)
    return ExpertsSpec(
        experts=EXPERTS,
        chosen=CHOSEN,
        normalise=normalise,
        gate_up=packed(kind, EXPERTS * 2 * FFN, HIDDEN),
        down=packed(kind, EXPERTS * HIDDEN, FFN),
        activation=activation,  # type: ignore[arg-type]
        norm=torch.rand(HIDDEN, generator=generator) + 0.5,
        eps=1e-6,
        scores=torch.randn(MAX_ROWS, EXPERTS, generator=generator),
        x=torch.randn(MAX_ROWS, HIDDEN, generator=generator),
        gated=torch.full((MAX_ROWS * CHOSEN, 2 * FFN), torch.nan),
        out=torch.full((MAX_ROWS * CHOSEN, HIDDEN), torch.nan),
    )


def run(backend: Backend, spec: ExpertsSpec, rows: int, first: int = 0) -> torch.Tensor:
    """x after the layer has run on ``rows`` rows from ``first`` on."""
    own = replace(spec, x=spec.x.roll(-first, 0), scores=spec.scores.roll(-first, 0))
    backend.reserve(MAX_ROWS * CHOSEN, FFN, 64)
    backend.bind(own)(rows)
    assert torch.equal(own.x[rows:], spec.x.roll(-first, 0)[rows:])
    return own.x[:rows]


@pytest.mark.parametrize("kind", ["int8", "bf16", "fp32", *FORMATS])
@pytest.mark.parametrize(("normalise", "activation"), [(True, "silu"), (False, "gelu")])
def test_native_matches_reference(kind: str, normalise: bool, activation: str) -> None:
    spec = make_spec(kind, normalise=normalise, activation=activation)
    ours, twin = (run(backend, spec, 9) - spec.x[:9] for backend in (native_backend(), ReferenceBackend(1)))
    # an activation at a rounding boundary may fall either way
    assert torch.linalg.norm(ours - twin) <= (2e-5 if kind in ("fp32", "bf16") else 4e-3) * torch.linalg.norm(twin)


@pytest.mark.parametrize("kind", ["int8", "fp32", "q4_k", "q8_0"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_the_batch(kind: str, threads: int) -> None:
    spec, backend = make_spec(kind), native_backend(threads)
    expected = run(backend, spec, MAX_ROWS)  # more than 192 rows of an expert
    for rows, first in ((1, 0), (1, 449), (2, 7), (5, 100), (12, 3), (13, 3), (40, 200), (193, 250), (440, 10)):
        assert torch.equal(run(backend, spec, rows, first), expected[first : first + rows]), (rows, first)


def test_shares_are_those_of_the_softmax() -> None:
    """Outputs of experts that are constant: what is added to x is the sum of the chosen experts' shares."""
    spec = make_spec("fp32")
    scores = spec.scores[:20].double()
    for normalise in (True, False):
        chosen, backend = scores.topk(CHOSEN), native_backend()
        shares = chosen.values.softmax(1) if normalise else scores.softmax(1).gather(1, chosen.indices)
        for expert in range(EXPERTS):
            down = torch.zeros(EXPERTS, HIDDEN, FFN)
            down[expert] = 1.0
            own = replace(
                spec,
                normalise=normalise,
                gate_up=pack_linear(torch.ones(EXPERTS * 2 * FFN, HIDDEN), None, "fp32"),
                down=pack_linear(down.flatten(0, 1), None, "fp32"),
                x=torch.ones(MAX_ROWS, HIDDEN),
            )
            added = run(backend, own, 20)[:, 0].double() - 1
            whole = FFN * own.norm.double().sum().square().item() / (1 + 1e-6)  # silu(s) is s for a large s
            expected = (shares * (chosen.indices == expert)).sum(1) * whole
            torch.testing.assert_close(added, expected, rtol=1e-4, atol=1e-6)


def test_of_equal_scores_the_first_experts_are_chosen() -> None:
    spec = make_spec("fp32")
    spec.scores[:] = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    same = replace(spec, scores=torch.tensor([-9.0, 1.0, -9.0, 1.0, 1.0, -9.0]).repeat(MAX_ROWS, 1))
    for backend in (native_backend(), ReferenceBackend(1)):
        assert torch.equal(run(backend, spec, 4), run(backend, same, 4))


def test_scores_that_are_no_numbers_choose_experts_that_exist() -> None:
    spec = make_spec("fp32")
    spec.scores[1] = torch.nan
    spec.scores[2, ::2] = torch.nan
    clean = make_spec("fp32")
    got, expected = run(native_backend(), spec, 4), run(native_backend(), clean, 4)
    assert torch.equal(got[[0, 3]], expected[[0, 3]])


def test_scratch_must_hold_all_pairs() -> None:
    spec = make_spec("fp32")
    backend = native_backend()
    backend.reserve(MAX_ROWS, FFN, 64)
    with pytest.raises(ValueError, match="pairs of rows and experts"):
        backend.bind(spec)
    backend.reserve(MAX_ROWS * CHOSEN, FFN, 64)
    with pytest.raises(ValueError, match="pairs of rows and experts"):
        backend.bind(replace(spec, out=spec.out[:10]))
