"""The worker pool under many small jobs: each unit once, none of another job's."""

from __future__ import annotations

import torch

from tests.kernels.natives import native_backend
from verify_kernels.backend import LinearSpec
from verify_kernels.packed_weights import pack_linear


def test_many_small_jobs_of_changing_size() -> None:
    """Jobs follow each other immediately and differ in size and function, so that a late worker gets a new job."""
    backend = native_backend(4)
    backend.reserve(64, 256, 64)
    generator = torch.Generator().manual_seed(0)
    cases = []
    for n in (64, 640, 128, 1920, 70):
        weight = pack_linear(torch.randn(n, 64, generator=generator), None, "int8")
        src, dst = torch.randn(64, 64, generator=generator), torch.zeros(64, n)
        op = backend.linear(LinearSpec(weight, src, dst))
        op(64)
        cases.append((op, dst, dst.clone()))
    for turn in range(4000):
        op, dst, expected = cases[turn % len(cases)]
        rows = 1 + turn % 7
        dst[:rows] = -1
        op(rows)
        assert torch.equal(dst[:rows], expected[:rows])
