"""The specialisations of the sampling kernels that `sampling` can launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verify_kernels.gpu.compile_case import CompileCase
from verify_kernels.gpu.sampling_choose_kernel import choose_kernel
from verify_kernels.gpu.sampling_edit_kernel import apply_edits_kernel, undo_edits_kernel
from verify_kernels.gpu.sampling_plan import SamplingPlan
from verify_kernels.gpu.sampling_pool import EDIT_BLOCK
from verify_kernels.gpu.sampling_scan_kernel import bounds_kernel, maxima_kernel, scan_kernel
from verify_kernels.gpu.sampling_shorten_kernel import shorten_kernel
from verify_kernels.gpu.sampling_variant import (
    CHOOSE_WARPS,
    EDIT_WARPS,
    EXACT,
    GREEDY,
    LOGPROBS,
    MAXIMA_OPTIONS,
    ROW_OPTIONS,
    SCAN_WARPS,
    SHORTEN_WARPS,
    VARIANTS,
    SamplingVariant,
)

_TYPES = {
    "logits": "*fp32", "temperature": "*fp32", "inverse": "*fp64", "seed": "*i64", "position": "*i64", "top_k": "*i32",
    "top_p": "*fp64", "log_min_p": "*fp32", "mask_begin": "*i32", "mask_words": "*i32", "pool": "*i32",
    "maxima": "*fp32", "peak": "*fp32", "bound": "*fp32", "places": "*i16", "spare": "*i16", "counts": "*i32",
    "weights": "*i64", "tokens": "*i32", "chosen": "*fp64", "ids": "*i32", "values": "*fp64", "edits": "*i32",
    "saved": "*fp32", "repetition": "*fp32", "inverse_repetition": "*fp64", "presence": "*fp32", "frequency": "*fp32",
}  # fmt: skip
_NUMBERS = ("row_stride", "vocab", "width", "splits", "blocks")
_ALIGNED = ("logits", "maxima", "places", "spare")


def every_case() -> list[CompileCase]:
    """Cases of all kernels; rows of a vocabulary that is a multiple of 16 are read 16 bytes at a time."""
    return [*_scans(), *_row_kernels(), *_edits()]


def _scans() -> Iterator[CompileCase]:
    for groups, group in dict.fromkeys(size[:2] for size in SamplingPlan.SIZES):
        tile = {"GROUPS": groups, "GROUP": group}
        for even in (True, False):
            for variant, table, masks in _forms():
                absent = _absent(variant, table, masks)
                name = _name(variant, table, masks, f"{groups * group}{'' if even else ' odd'}")
                flags = _flags(variant) | {"MASK": masks}
                yield _case(f"scan {name}", scan_kernel, flags | tile | absent, SCAN_WARPS, even)
                if variant.needs_peak:
                    yield _case(
                        f"maxima {name}",
                        maxima_kernel,
                        {"MASK": masks} | tile | absent,
                        SCAN_WARPS,
                        even,
                        MAXIMA_OPTIONS,
                    )


def _row_kernels() -> Iterator[CompileCase]:
    for size in SamplingPlan.SIZES:
        plan = SamplingPlan(1, *size)
        lists = {"TOKENS": plan.tokens, "SPLITS": plan.segments}
        for variant, table, masks in _forms():
            if masks:
                continue
            absent, flags = _absent(variant, table, True), _flags(variant)
            name = _name(variant, table, False, f"{plan.tokens} x {plan.segments}")
            if variant.needs_peak:
                blocks = {"GROUP": plan.group, "BLOCKS": plan.segments * plan.groups}
                yield _case(f"bounds {name}", bounds_kernel, flags | blocks | absent, SCAN_WARPS)
                sizes = lists | {"COLUMNS": plan.columns(False)}
                yield _case(
                    f"shorten {name}", shorten_kernel, flags | sizes | absent, SHORTEN_WARPS, options=ROW_OPTIONS
                )
            absent |= dict.fromkeys(() if variant.total else ("peak", "weights", "values"))
            absent |= dict.fromkeys(() if variant == LOGPROBS else ("tokens", "chosen"))
            sizes = lists | {"COLUMNS": plan.columns(True)}
            yield _case(f"choose {name}", choose_kernel, flags | sizes | absent, CHOOSE_WARPS, options=ROW_OPTIONS)


def _edits() -> Iterator[CompileCase]:
    for kernel in (apply_edits_kernel, undo_edits_kernel):
        yield _case(kernel.__name__.removesuffix("_kernel"), kernel, {"BLOCK": EDIT_BLOCK}, EDIT_WARPS)


def _forms() -> Iterator[tuple[SamplingVariant, bool, bool]]:
    """Variant, whether there is a table, whether there are masks."""
    for variant in VARIANTS:
        if not variant.noise:
            yield variant, False, False
        if variant.noise or variant == GREEDY:
            yield variant, True, False
            yield variant, True, True


def _flags(variant: SamplingVariant) -> dict[str, Any]:
    return {"NOISE": variant.noise, "FILTERS": variant.filters, "TOTAL": variant.total, "WIDE": variant.wide}


def _absent(variant: SamplingVariant, table: bool, masks: bool) -> dict[str, Any]:
    """Arguments that are None in a form."""
    names = [] if table else ["temperature"]
    names += [] if variant.noise else ["inverse", "seed", "position"]
    names += [] if variant.filters else ["top_k", "top_p", "log_min_p", "bound", "spare"]
    names += [] if masks else ["mask_begin", "mask_words", "pool"]
    names += [] if variant.needs_peak else ["peak", "weights"]
    return dict.fromkeys(names)


def _name(variant: SamplingVariant, table: bool, masks: bool, size: str) -> str:
    return f"{variant.name}{'' if table else ' without table'}{' masked' if masks else ''} {size}"


def _case(
    name: str,
    kernel: Any,
    constexprs: dict[str, Any],
    warps: int,
    even: bool = True,
    options: dict[str, Any] = EXACT,
) -> CompileCase:
    names = kernel.arg_names
    types = _TYPES | dict.fromkeys(_NUMBERS, "i32")
    signature = {key: types[key] for key in names if key in types and key not in constexprs}
    return CompileCase(
        name=f"sampling {name}",
        kernel=kernel,
        signature=signature,
        constexprs={key: value for key, value in constexprs.items() if key in names},
        divisible=_divisible(kernel, signature, even),
        options={"num_warps": warps, **options},
    )


def _divisible(kernel: Any, signature: dict[str, str], even: bool) -> tuple[str, ...]:
    """Of the arguments that triton looks at: tensors are aligned, and rows where the vocabulary is even."""
    if kernel in (apply_edits_kernel, undo_edits_kernel):
        return ()
    looked_at = _ALIGNED if kernel is not choose_kernel else ("places", "spare")
    numbers = ("row_stride", "vocab") if even and kernel in (scan_kernel, maxima_kernel) else ()
    return tuple(name for name in signature if name in (*looked_at, *numbers))
