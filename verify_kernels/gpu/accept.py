"""Which draft nodes the target accepts: the walk down each tree, and what the next step and `move_kv` need of it."""

from __future__ import annotations

from torch import Tensor

from verify_kernels.forward_batch import PAGE_SIZE
from verify_kernels.gpu.accept_kernel import accept_kernel
from verify_kernels.gpu.accept_result import AcceptResult
from verify_kernels.gpu.argument_checks import INDEX, check_rank, check_tensor
from verify_kernels.gpu.compile_case import CompileCase

SIZES = (16, 64, 256)  # what trees and walks are padded to
MAX_NODES = SIZES[-1]
OPTIONS = {"num_warps": 1, "num_stages": 1}


def accept(
    entry_start: Tensor,
    entry_ctx: Tensor,
    root_row: Tensor,
    parent: Tensor,
    tokens: Tensor,
    sampled: Tensor,
    page_table: Tensor,
    result: AcceptResult,
    *,
    max_nodes: int,
    n_pages: int,
    sample_start: Tensor | None = None,
) -> None:
    """Walk down each entry's tree: from the root on, go to the child that holds the token sampled at the row.

    All int32. entry_start: [entries + 1]; entry_ctx: [entries]; root_row: [entries], the row of the entry that is its
    tree's root, -1 where it has no tree (amid a prompt): it accepts nothing and all its rows are kept. parent (row of
    the entry), tokens: [rows]. sampled: the target's token at each row, -1 where there was no usable logit, as at
    ``entry_start + row``, or, where only trees were sampled, at ``sample_start + row - root_row`` with sample_start:
    [entries]. page_table: [entries, max_pages] with page ids below ``n_pages``. Rows past the root's first
    ``max_nodes`` (<= 256) are no nodes; a walk has at most ``result.rows.shape[1] - 1`` of them. Of siblings that
    hold one token the first counts. ``result.next_ctx`` may be ``entry_ctx`` itself.

    Raises:
        ValueError: a shape, dtype, device or layout is wrong, or max_nodes or n_pages is out of range.
    """
    _check(entry_start, entry_ctx, root_row, parent, tokens, sampled, page_table, sample_start)
    entries, walk = _check_result(result, entry_ctx)
    if not 1 <= max_nodes <= MAX_NODES:
        raise ValueError(f"max_nodes: {max_nodes}; must lie in 1 to {MAX_NODES}")
    if not 0 <= n_pages * PAGE_SIZE < 2**31:
        raise ValueError(f"n_pages: {n_pages}; must be at least 0 and hold less than 2^31 slots")
    accept_kernel[(entries,)](
        entry_start, entry_ctx, root_row, parent, tokens, sampled, sample_start, page_table,
        result.counts, result.pending, result.rows, result.emitted, result.next_ctx,
        result.n_moves, result.move_source, result.move_target,
        parent.shape[0], sampled.shape[0], max_nodes, walk - 1, page_table.shape[1], n_pages,
        NODES=_size(max_nodes), WALK=_size(walk), **OPTIONS,
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Every size of tree and walk."""
    return [_case(nodes, walk, per_row) for nodes in SIZES for walk in SIZES for per_row in (True, False)]


def _case(nodes: int, walk: int, per_row: bool) -> CompileCase:
    tensors = (
        "entry_start", "entry_ctx", "root_row", "parent", "tokens", "sampled", "page_table", "counts", "pending",
        "rows", "emitted", "next_ctx", "n_moves", "move_source", "move_target",
    )  # fmt: skip
    numbers = ("n_rows", "n_samples", "max_nodes", "max_depth", "max_pages", "n_pages")
    signature = dict.fromkeys(tensors, "*i32") | dict.fromkeys(numbers, "i32")
    absent = {"sample_start": None} if per_row else {}
    if not per_row:
        signature["sample_start"] = "*i32"
    return CompileCase(
        name=f"accept {nodes} nodes, walk {walk}{'' if per_row else ', trees sampled'}",
        kernel=accept_kernel,
        signature=signature,
        constexprs={"NODES": nodes, "WALK": walk, **absent},
        options=OPTIONS,
    )


def _size(n: int) -> int:
    return next(size for size in SIZES if size >= n)


def _check(
    entry_start: Tensor,
    entry_ctx: Tensor,
    root_row: Tensor,
    parent: Tensor,
    tokens: Tensor,
    sampled: Tensor,
    page_table: Tensor,
    sample_start: Tensor | None,
) -> None:
    device = entry_ctx.device
    check_rank("entry_ctx", entry_ctx, 1)
    check_rank("parent", parent, 1)
    check_rank("sampled", sampled, 1)
    check_rank("page_table", page_table, 2)
    (entries,), (rows,) = entry_ctx.shape, parent.shape
    check_tensor("entry_ctx", entry_ctx, (entries,), INDEX, device)
    check_tensor("entry_start", entry_start, (entries + 1,), INDEX, device)
    check_tensor("root_row", root_row, (entries,), INDEX, device)
    check_tensor("parent", parent, (rows,), INDEX, device)
    check_tensor("tokens", tokens, (rows,), INDEX, device)
    check_tensor("page_table", page_table, (entries, page_table.shape[1]), INDEX, device)
    if sample_start is None:
        check_tensor("sampled", sampled, (rows,), INDEX, device)
    else:
        check_tensor("sampled", sampled, sampled.shape, INDEX, device)
        check_tensor("sample_start", sample_start, (entries,), INDEX, device)


def _check_result(result: AcceptResult, entry_ctx: Tensor) -> tuple[int, int]:
    """Entries, and rows of the longest walk."""
    check_rank("result.rows", result.rows, 2)
    (entries,), walk = entry_ctx.shape, result.rows.shape[1]
    if not 1 <= walk <= MAX_NODES or entries == 0:
        raise ValueError(f"result.rows: has shape {tuple(result.rows.shape)}; must be [1 or more, 1 to {MAX_NODES}]")
    shapes: tuple[tuple[str, Tensor, tuple[int, ...]], ...] = (
        ("counts", result.counts, (entries,)),
        ("pending", result.pending, (entries,)),
        ("rows", result.rows, (entries, walk)),
        ("emitted", result.emitted, (entries, walk)),
        ("next_ctx", result.next_ctx, (entries,)),
        ("n_moves", result.n_moves, (entries,)),
        ("move_source", result.move_source, (entries, walk - 1)),
        ("move_target", result.move_target, (entries, walk - 1)),
    )
    for name, tensor, shape in shapes:
        check_tensor(f"result.{name}", tensor, shape, INDEX, entry_ctx.device)
    return entries, walk
