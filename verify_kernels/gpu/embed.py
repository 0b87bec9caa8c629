"""Token embeddings, looked up and scaled."""

from __future__ import annotations

from torch import Tensor

from verify_kernels.gpu.argument_checks import check_rank
from verify_kernels.gpu.compile_case import CompileCase
from verify_kernels.gpu.gather_rows import compile_cases as gather_cases
from verify_kernels.gpu.gather_rows import launch_gather


def embed(table: Tensor, tokens: Tensor, scale: float, out: Tensor) -> None:
    """out[r] = table[tokens[r]] * scale, in float32; zeros where tokens[r] is no id (a padded row).

    table: [vocab, hidden]; tokens: int32 [rows]; out: [rows, hidden]; table and out float32, float16 or bfloat16.

    Raises:
        ValueError: a shape, dtype, device or layout is wrong.
    """
    check_rank("table", table, 2)
    launch_gather("table", table, "tokens", tokens, out, scale)


def compile_cases() -> list[CompileCase]:
    """Those of the gather it is."""
    return gather_cases()
