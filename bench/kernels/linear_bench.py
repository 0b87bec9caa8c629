"""Linear layers: time and share of the memory's bandwidth, by weight and rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.kernels.kernel_timer import KernelTimer
from verify_kernels.gpu.linear import linear
from verify_kernels.gpu.linear_fp8 import linear_fp8
from verify_kernels.gpu.linear_int4 import linear_int4
from verify_kernels.gpu.linear_int4_weight import pack_int4
from verify_kernels.gpu.linear_tiles import LinearKind
from verify_kernels.gpu.linear_workspace import LinearWorkspace
from verify_kernels.gpu.quantize_weight import quantize_weight

LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
ROWS = (1, 32, 64)
KINDS: tuple[LinearKind, ...] = ("bf16", "fp8", "int4")
GROUP = 128


def linear_figures(
    n: int, k: int, kind: LinearKind, timer: KernelTimer, device: torch.device, peak: float
) -> list[dict[str, Any]]:
    """Of each number of rows: microseconds, and the weight's bytes as a share of ``peak`` bytes/s. bf16 also says what
    the vendor's library takes."""
    found = []
    nbytes, bind = _weight(n, k, kind, device)
    for rows in ROWS:
        took = timer.microseconds(bind(rows))
        figures = {
            "name": f"{kind} {n}x{k} rows{rows}", "us": took, "weight_bytes": nbytes,
            "bandwidth_share": nbytes / (took * 1e-6) / peak,
        }  # fmt: skip
        if kind == "bf16":
            x, weight = _random(rows, k, device), _random(n, k, device)
            out = torch.empty(rows, n, dtype=x.dtype, device=device)
            figures["library_us"] = timer.microseconds(partial(torch.mm, x, weight.t(), out=out))
        found.append(figures)
    return found


def _random(n: int, k: int, device: torch.device) -> torch.Tensor:
    return (torch.randn(n, k, device=device) * k**-0.5).to(torch.bfloat16)


def _weight(n: int, k: int, kind: LinearKind, device: torch.device) -> tuple[int, Callable[[int], Callable[[], None]]]:
    """Bytes of a weight, and what makes the work for a number of rows."""
    workspace = LinearWorkspace.for_layers([(n, k, kind, GROUP)], max(ROWS), device)

    def out(rows: int) -> torch.Tensor:
        return torch.empty(rows, n, dtype=torch.bfloat16, device=device)

    if kind == "int4":
        levels = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
        scales = torch.full((n, -(-k // GROUP)), 0.01, dtype=torch.float16, device=device)
        packed = pack_int4(levels, scales, None, GROUP)

        def int4(rows: int) -> Callable[[], None]:
            x, y = _random(rows, k, device), out(rows)
            return lambda: linear_int4(x, packed, y, workspace=workspace)

        return packed.nbytes, int4
    dense = _random(n, k, device)
    if kind == "fp8":
        weight, scale = quantize_weight(dense)

        def fp8(rows: int) -> Callable[[], None]:
            x, x_scale = quantize_weight(_random(rows, k, device))
            y = out(rows)
            return lambda: linear_fp8(x, x_scale, weight, scale, y, workspace=workspace)

        return weight.numel() + 4 * n, fp8

    def bf16(rows: int) -> Callable[[], None]:
        x, y = _random(rows, k, device), out(rows)
        return lambda: linear(x, dense, y, workspace=workspace)

    return 2 * n * k, bf16
