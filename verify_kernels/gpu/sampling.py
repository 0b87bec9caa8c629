"""The sampler's launches: rows of logits on the device to tokens, children and log-probabilities on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from verify_kernels.gpu.argument_checks import INDEX, check_tensor
from verify_kernels.gpu.compile_case import CompileCase
from verify_kernels.gpu.sampling_cases import every_case
from verify_kernels.gpu.sampling_choose_kernel import choose_kernel
from verify_kernels.gpu.sampling_edit_kernel import apply_edits_kernel, undo_edits_kernel
from verify_kernels.gpu.sampling_needs import SamplingNeeds
from verify_kernels.gpu.sampling_pool import EDIT_BLOCK
from verify_kernels.gpu.sampling_scan_kernel import bounds_kernel, maxima_kernel, scan_kernel
from verify_kernels.gpu.sampling_shorten_kernel import shorten_kernel
from verify_kernels.gpu.sampling_table import SamplingTable
from verify_kernels.gpu.sampling_variant import (
    CHILDREN,
    CHOOSE_WARPS,
    EDIT_WARPS,
    EXACT,
    FILTERED,
    GREEDY,
    LOGPROBS,
    MAXIMA_OPTIONS,
    NOISY,
    ROW_OPTIONS,
    SCAN_WARPS,
    SHORTEN_WARPS,
    SamplingVariant,
)
from verify_kernels.gpu.sampling_workspace import SamplingWorkspace
from verify_kernels.sampling_kernels import MAX_WIDTH

_DOUBLE = (torch.float64,)


def greedy(logits: Tensor, workspace: SamplingWorkspace, tokens: Tensor) -> None:
    """The lowest id of each row's largest logit, -1 where none is live. Two launches.

    logits: float32 [rows, vocab], unit stride in a row. tokens: int32 [rows].

    Raises:
        ValueError: a shape, dtype, device or layout is wrong, or ``workspace`` is for another vocabulary or fewer rows.
    """
    _check_logits(logits, workspace, None)
    check_tensor("tokens", tokens, (logits.shape[0],), INDEX, logits.device)
    _run(GREEDY, logits, None, False, workspace, 1, tokens, None)


def sample(
    logits: Tensor, table: SamplingTable, needs: SamplingNeeds, workspace: SamplingWorkspace, tokens: Tensor
) -> None:
    """The token each row takes (DESIGN section 4), -1 where none is live or the row is inert.

    Two launches; five with ``needs.filters``; two more with ``needs.edits``, which write into ``logits`` and restore
    them. needs: what `SamplingTable.fill` said, or more. logits: float32 [rows, vocab], rows apart; tokens: int32
    [rows]. Rows of ``table`` beyond the logits' are not looked at.

    Raises:
        ValueError: a shape, dtype, device or layout is wrong, or ``table`` or ``workspace`` does not fit the logits.
    """
    _check_logits(logits, workspace, table)
    check_tensor("tokens", tokens, (logits.shape[0],), INDEX, logits.device)
    variant = FILTERED if needs.filters else NOISY if needs.noise else GREEDY
    _with_edits(variant, logits, table, needs, workspace, 1, tokens, None)


def children(
    logits: Tensor,
    table: SamplingTable,
    needs: SamplingNeeds,
    workspace: SamplingWorkspace,
    ids: Tensor,
    values: Tensor,
) -> None:
    """The best ``width`` tokens per row by z + G under the row's filters (greedy: by logit), best first.

    ids: int32 [rows, width], width 1 to 64, -1 beyond the last; values: float64 [rows, width], log-probabilities in
    the processed and filtered distribution, -inf beyond the last. Five launches, seven with ``needs.edits``. The rest
    as in `sample`.

    Raises:
        ValueError: as in `sample`, or width is out of range.
    """
    _check_logits(logits, workspace, table)
    width = _width("ids", ids, 1)
    check_tensor("ids", ids, (logits.shape[0], width), INDEX, logits.device)
    check_tensor("values", values, (logits.shape[0], width), _DOUBLE, logits.device)
    _with_edits(CHILDREN, logits, table, needs, workspace, width, ids, values)


def logprobs(
    logits: Tensor, tokens: Tensor, workspace: SamplingWorkspace, chosen: Tensor, ids: Tensor, values: Tensor
) -> None:
    """log softmax of the logits as they are: of ``tokens`` int32 [rows], and of the best ``top`` per row.

    chosen: float64 [rows], -inf where the token is -1; ids: int32 [rows, top], top 0 to 64, by falling probability,
    -1 beyond the last; values: float64 [rows, top]. Five launches.

    Raises:
        ValueError: a shape, dtype, device or layout is wrong, ``workspace`` does not fit, or top is out of range.
    """
    _check_logits(logits, workspace, None)
    rows, top = logits.shape[0], _width("ids", ids, 0)
    check_tensor("tokens", tokens, (rows,), INDEX, logits.device)
    check_tensor("chosen", chosen, (rows,), _DOUBLE, logits.device)
    check_tensor("ids", ids, (rows, top), INDEX, logits.device)
    check_tensor("values", values, (rows, top), _DOUBLE, logits.device)
    _run(LOGPROBS, logits, None, False, workspace, top, ids, values, tokens, chosen)


def compile_cases() -> list[CompileCase]:
    """Every form of every kernel, for all that `SamplingPlan` can choose."""
    return every_case()


def _with_edits(
    variant: SamplingVariant,
    logits: Tensor,
    table: SamplingTable,
    needs: SamplingNeeds,
    workspace: SamplingWorkspace,
    width: int,
    ids: Tensor,
    values: Tensor | None,
) -> None:
    rows, vocab = logits.shape
    if needs.edits and rows:
        apply_edits_kernel[(rows,)](
            logits, table.edits, table.pool, table.saved,
            table.repetition, table.inverse_repetition, table.presence, table.frequency,
            logits.stride(0), vocab, BLOCK=EDIT_BLOCK, num_warps=EDIT_WARPS, **EXACT,
        )  # fmt: skip
    _run(variant, logits, table, needs.masks, workspace, width, ids, values)
    if needs.edits and rows:
        undo_edits_kernel[(rows,)](
            logits, table.edits, table.pool, table.saved, logits.stride(0), vocab,
            BLOCK=EDIT_BLOCK, num_warps=EDIT_WARPS, **EXACT,
        )  # fmt: skip


def _run(
    variant: SamplingVariant,
    logits: Tensor,
    table: SamplingTable | None,
    masks: bool,
    workspace: SamplingWorkspace,
    width: int,
    ids: Tensor,
    values: Tensor | None,
    tokens: Tensor | None = None,
    chosen: Tensor | None = None,
) -> None:
    rows, vocab = logits.shape
    if rows == 0:
        return
    plan, stride, w = workspace.plan, logits.stride(0), workspace
    t = variant.columns_of(table, masks)
    heat, mask = t["temperature"], (t["mask_begin"], t["mask_words"], t["pool"])
    filters = (t["top_k"], t["top_p"])
    noise = (t["inverse"], t["seed"], t["position"])
    peak = w.peak if variant.needs_peak else None
    weights = w.weights if variant.needs_peak else None
    bound = w.bound if variant.filters else None
    spare = w.spare if variant.filters else None
    grid = (plan.splits, rows)
    if variant.needs_peak:
        maxima_kernel[grid](
            logits, heat, t["inverse"], *mask, w.maxima, stride, vocab,
            MASK=masks, GROUPS=plan.groups, GROUP=plan.group, num_warps=SCAN_WARPS, **MAXIMA_OPTIONS,
        )  # fmt: skip
        bounds_kernel[(rows,)](
            heat, *filters, w.maxima, peak, bound, plan.splits * plan.groups, vocab,
            FILTERS=variant.filters, GROUP=plan.group, BLOCKS=plan.segments * plan.groups,
            num_warps=SCAN_WARPS, **EXACT,
        )  # fmt: skip
    scan_kernel[grid](
        logits, heat, *noise, *filters, t["log_min_p"], *mask, peak, bound, w.places, w.counts, weights,
        stride, vocab, max(width, 1),
        NOISE=variant.noise, FILTERS=variant.filters, TOTAL=variant.total, WIDE=variant.wide, MASK=masks,
        GROUPS=plan.groups, GROUP=plan.group, num_warps=SCAN_WARPS, **EXACT,
    )  # fmt: skip
    if variant.filters or variant.wide:
        shorten_kernel[(rows,)](
            logits, heat, *noise, *filters, t["log_min_p"], peak, w.places, spare, w.counts, weights,
            stride, vocab, width, plan.splits,
            NOISE=variant.noise, FILTERS=variant.filters, TOTAL=variant.total, WIDE=variant.wide,
            TOKENS=plan.tokens, SPLITS=plan.segments, COLUMNS=plan.columns(False),
            num_warps=SHORTEN_WARPS, **ROW_OPTIONS,
        )  # fmt: skip
    choose_kernel[(rows,)](
        logits, heat, *noise, peak if variant.total else None, w.places, w.counts, weights if variant.total else None,
        tokens, chosen, ids, values, stride, vocab, width, plan.splits,
        NOISE=variant.noise, TOTAL=variant.total, WIDE=variant.wide,
        TOKENS=plan.tokens, SPLITS=plan.segments, COLUMNS=plan.columns(True), num_warps=CHOOSE_WARPS, **ROW_OPTIONS,
    )  # fmt: skip


def _width(name: str, ids: Tensor, least: int) -> int:
    if ids.dim() != 2 or not least <= ids.shape[1] <= MAX_WIDTH:
        raise ValueError(f"{name}: has shape {tuple(ids.shape)}; must be [rows, {least} to {MAX_WIDTH}]")
    return ids.shape[1]


def _check_logits(logits: Tensor, workspace: SamplingWorkspace, table: SamplingTable | None) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits: {logits.dtype} {tuple(logits.shape)}; must be float32 [rows, vocab], rows unbroken")
    rows, vocab = logits.shape
    if logits.stride(0) < vocab and rows > 1:
        raise ValueError(f"logits: rows overlap, stride {logits.stride(0)}; pass contiguous ones")
    if vocab != workspace.plan.vocab or rows > workspace.rows or workspace.counts.device != logits.device:
        raise ValueError(
            f"workspace: for {workspace.rows} x {workspace.plan.vocab} logits on {workspace.counts.device};"
            f" got {rows} x {vocab} on {logits.device}"
        )
    if table is not None and (rows > table.rows or table.pool.device != logits.device):
        raise ValueError(f"table: {table.rows} rows on {table.pool.device}; got {rows} on {logits.device}")
