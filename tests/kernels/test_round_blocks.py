"""Rounding to Q4_0: the error does not exceed plain rounding's, and exact values stay exact."""

from __future__ import annotations

import torch

from verify_kernels.packed_weights import pack_block_linear, round_blocks, unpack_linear


def rounded(weight: torch.Tensor) -> torch.Tensor:
    return unpack_linear(pack_block_linear(round_blocks(weight), None, "q4_0", weight.shape[1]))


def test_representable_values_are_kept() -> None:
    generator = torch.Generator().manual_seed(3)
    levels = torch.randint(-8, 8, (40, 6, 32), generator=generator).float()
    levels[:, :, 5] = -8.0  # the largest of a group is eight times its scale
    scales = torch.randn(40, 6, 1, generator=generator).half().float()
    scales[3] = 0.0
    weight = (levels * scales).flatten(1)
    assert torch.equal(rounded(weight), weight)


def test_its_error_is_below_that_of_plain_rounding() -> None:
    weight = torch.randn(64, 448, generator=torch.Generator().manual_seed(4))
    groups = weight.view(64, -1, 32)
    extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    plain = ((groups / (extreme / -8)).round().clamp(-8, 7) * (extreme / -8)).flatten(1)
    ours, theirs = (
        (rounded(weight) - weight).square().view(64, -1, 32).sum(2),
        (plain - weight).square().view(64, -1, 32).sum(2),
    )
    assert bool((ours <= theirs * 1.001 + 1e-6).all())  # scales of 16 bits
    assert ours.sum() < 0.9 * theirs.sum()
