"""Rounding to Q4_0 and Q3_0: the error does not exceed plain rounding's, and exact values stay exact."""

from __future__ import annotations

import pytest
import torch

from verify_kernels.packed_weights import FITS, DraftKind, pack_block_linear, round_blocks, unpack_linear
from verify_kernels.quant_formats import FORMATS


def rounded(weight: torch.Tensor, kind: DraftKind) -> torch.Tensor:
    return unpack_linear(pack_block_linear(round_blocks(weight, kind), None, kind, weight.shape[1]))


@pytest.mark.parametrize("kind", FITS)
def test_representable_values_are_kept(kind: DraftKind) -> None:
    most = FORMATS[kind].offset
    generator = torch.Generator().manual_seed(3)
    levels = torch.randint(-most, most, (40, 6, 32), generator=generator).float()
    levels[:, :, 5] = -most  # the largest of a group is so many times its scale
    scales = torch.randn(40, 6, 1, generator=generator).half().float()
    scales[3] = 0.0
    weight = (levels * scales).flatten(1)
    assert torch.equal(rounded(weight, kind), weight)


@pytest.mark.parametrize("kind", FITS)
def test_its_error_is_below_that_of_plain_rounding(kind: DraftKind) -> None:
    most = FORMATS[kind].offset
    weight = torch.randn(64, 448, generator=torch.Generator().manual_seed(4))
    groups = weight.view(64, -1, 32)
    extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    plain = ((groups / (extreme / -most)).round().clamp(-most, most - 1) * (extreme / -most)).flatten(1)
    ours, theirs = (
        (rounded(weight, kind) - weight).square().view(64, -1, 32).sum(2),
        (plain - weight).square().view(64, -1, 32).sum(2),
    )
    assert bool((ours <= theirs * 1.001 + 1e-6).all())  # scales of 16 bits
    assert ours.sum() < 0.9 * theirs.sum()
