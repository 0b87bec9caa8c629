"""Depths and ancestor words of a batch's rows from their parents, on the device."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from verify_kernels.gpu.argument_checks import INDEX, check_rank, check_tensor
from verify_kernels.gpu.compile_case import CompileCase
from verify_kernels.gpu.tree_build_kernel import tree_build_kernel

ROWS = 32
OPTIONS = {"num_warps": 1, "num_stages": 1}
WORD_BLOCKS = (1, 2, 4, 8)


def tree_build(
    parent: Tensor,
    entry_of: Tensor,
    entry_start: Tensor,
    root_row: Tensor,
    depth: Tensor,
    anc: Tensor,
    *,
    max_depth: int,
) -> None:
    """Fill ``depth`` and ``anc``: bit j of word j // 64 of a row is set where row j of its entry is it or above it.

    parent, entry_of: int32 [rows]; entry_start: int32 [entries + 1]; root_row: int32 [entries], the row of the entry
    that is its tree's root, -1 where all its rows are a chain; rows up to the root are a chain whatever their parents
    say. depth: int32 [rows]; anc: int64 [rows, words]; rows beyond 64 words have no bits. max_depth: the deepest draft
    node lies that far below its root; one that lies deeper is taken for padding. Padding, that is rows outside their
    entry's or of no entry, gets depth 0 and no bits.

    Raises:
        ValueError: a shape, dtype, device or layout is wrong, or max_depth is negative.
    """
    check_rank("parent", parent, 1)
    check_rank("root_row", root_row, 1)
    check_rank("anc", anc, 2)
    (rows,), (entries,), device = parent.shape, root_row.shape, parent.device
    words = anc.shape[1]
    check_tensor("parent", parent, (rows,), INDEX, device)
    check_tensor("entry_of", entry_of, (rows,), INDEX, device)
    check_tensor("entry_start", entry_start, (entries + 1,), INDEX, device)
    check_tensor("root_row", root_row, (entries,), INDEX, device)
    check_tensor("depth", depth, (rows,), INDEX, device)
    check_tensor("anc", anc, (rows, words), (torch.int64,), device)
    if words == 0:
        raise ValueError("anc: has no words; must have at least one")
    if max_depth < 0:
        raise ValueError(f"max_depth: {max_depth}; must not be negative")
    if rows == 0:
        return
    block = min(WORD_BLOCKS[-1], triton.next_power_of_2(words))
    tree_build_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(words, block))](
        parent, entry_of, entry_start, root_row, depth, anc, rows, entries, words, max_depth,
        ROWS=ROWS, WORDS=block, **OPTIONS,
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Every block of words."""
    tensors = ("parent", "entry_of", "entry_start", "root_row", "depth")
    numbers = ("n_rows", "n_entries", "n_words", "max_depth")
    signature = dict.fromkeys(tensors, "*i32") | {"anc": "*i64"} | dict.fromkeys(numbers, "i32")
    return [
        CompileCase(
            name=f"tree_build {words} words",
            kernel=tree_build_kernel,
            signature=signature,
            constexprs={"ROWS": ROWS, "WORDS": words},
            options=OPTIONS,
        )
        for words in WORD_BLOCKS
    ]
