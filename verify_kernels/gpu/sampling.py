"""The sampler's launches: rows of logits on the device to tokens, children and log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor

from verify_kernels.gpu.kernel_launch import CompileCase, launch_options
from verify_kernels.gpu.sampling_choose import choose_kernel, shorten_kernel
from verify_kernels.gpu.sampling_scan import (
    apply_edits_kernel,
    bounds_kernel,
    maxima_kernel,
    scan_kernel,
    undo_edits_kernel,
)
from verify_kernels.gpu.sampling_table import EDIT_BLOCK, SamplingNeeds, SamplingPlan, SamplingTable, SamplingWorkspace

# Launch options by kernel. A fused multiply-add would be another rounding.
SCAN = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": False}
EDIT = BOUNDS = SCAN
# With a bound on registers, for ptxas, left alone, spills a few bytes so that more programs fit.
MAXIMA = SCAN | {"maxnreg": 64}
SHORTEN = SCAN | {"num_warps": 16, "maxnreg": 128}
CHOOSE = SCAN | {"num_warps": 4, "maxnreg": 128}

# Columns of a `SamplingTable`
_NOISE = ("inverse", "seed", "position")
_FILTERS = ("top_k", "top_p", "log_min_p")
_MASKS = ("mask_begin", "mask_words", "pool")


@dataclass(frozen=True, slots=True)
class SamplingVariant:
    """noise, filters: whether a row may have them. wide: several tokens with their log-probabilities are wanted."""

    name: str
    noise: bool
    filters: bool
    wide: bool

    @property
    def needs_peak(self) -> bool:
        """Whether the largest z must be known before the scan, and lists shortened after it."""
        return self.filters or self.wide


GREEDY = SamplingVariant("greedy", noise=False, filters=False, wide=False)
NOISY = SamplingVariant("noisy", noise=True, filters=False, wide=False)
FILTERED = SamplingVariant("filtered", noise=True, filters=True, wide=False)
CHILDREN = SamplingVariant("children", noise=True, filters=True, wide=True)
LOGPROBS = SamplingVariant("logprobs", noise=False, filters=False, wide=True)
VARIANTS = (GREEDY, NOISY, FILTERED, CHILDREN, LOGPROBS)
NO_NEEDS = SamplingNeeds()


_TYPES = {
    "logits": "*fp32", "temperature": "*fp32", "inverse": "*fp64", "seed": "*i64", "position": "*i64", "top_k": "*i32",
    "top_p": "*fp64", "log_min_p": "*fp32", "mask_begin": "*i32", "mask_words": "*i32", "pool": "*i32",
    "maxima": "*fp32", "peak": "*fp32", "bound": "*fp32", "places": "*i16", "spare": "*i16", "counts": "*i32",
    "weights": "*i64", "tokens": "*i32", "chosen": "*fp64", "ids": "*i32", "values": "*fp64", "edits": "*i32",
    "saved": "*fp32", "repetition": "*fp32", "inverse_repetition": "*fp64", "presence": "*fp32", "frequency": "*fp32",
}  # fmt: skip
_NUMBERS = ("row_stride", "vocab", "width", "splits", "blocks")


def compile_cases() -> list[CompileCase]:
    """Cases of all kernels; rows of a vocabulary that is a multiple of 16 are read 16 bytes at a time.

    Plans that differ in what a kernel does not read give equal cases.
    """
    block = {"BLOCK": EDIT_BLOCK}
    cases = [
        _case("apply_edits", apply_edits_kernel, block, EDIT),
        _case("undo_edits", undo_edits_kernel, block, EDIT),
    ]
    forms = [(variant, masks) for variant in VARIANTS for masks in (False, True) if variant != LOGPROBS or not masks]
    for size, (variant, masks) in product(SamplingPlan.SIZES, forms):
        plan = SamplingPlan(1, *size)
        name = f"{variant.name}{' masked' if masks else ''} {plan.tokens} x {plan.segments}"
        constants = {
            "NOISE": variant.noise, "FILTERS": variant.filters, "WIDE": variant.wide, "MASK": masks,
            "GROUPS": plan.groups, "GROUP": plan.group, "BLOCKS": plan.segments * plan.groups,
            "TOKENS": plan.tokens, "SPLITS": plan.segments, **_absent(variant, masks),
        }  # fmt: skip
        long = constants | {"COLUMNS": plan.columns(False)}
        short = constants | {"COLUMNS": plan.columns(True)}
        short |= {} if variant.wide else dict.fromkeys(("peak", "weights"))
        for kind, even in (("", ("row_stride", "vocab")), (" odd", ())):
            cases.append(_case(f"scan {name}{kind}", scan_kernel, constants, SCAN, even))
            if variant.needs_peak:
                cases.append(_case(f"maxima {name}{kind}", maxima_kernel, constants, MAXIMA, even))
        if variant.needs_peak:
            cases.append(_case(f"bounds {name}", bounds_kernel, constants, BOUNDS))
            cases.append(_case(f"shorten {name}", shorten_kernel, long, SHORTEN))
        cases.append(_case(f"choose {name}", choose_kernel, short, CHOOSE))
    return cases


def _absent(variant: SamplingVariant, masks: bool) -> dict[str, Any]:
    """Arguments that are None in a form."""
    names = [] if variant.noise else [*_NOISE]
    names += [] if variant.filters else [*_FILTERS, "bound", "spare"]
    names += [] if masks else _MASKS
    names += [] if variant.needs_peak else ["peak", "weights"]
    names += [] if variant.wide else ["values"]
    names += ["temperature"] if variant == LOGPROBS else ["tokens", "chosen"]
    return dict.fromkeys(names)


def _case(
    name: str,
    kernel: Any,
    constants: dict[str, Any],
    options: dict[str, Any],
    divisible: tuple[str, ...] = (),
) -> CompileCase:
    """The case of a kernel with those of ``constants`` that it has."""
    types = _TYPES | dict.fromkeys(_NUMBERS, "i32")
    return CompileCase(
        name=f"sampling {name}",
        kernel=kernel,
        signature={key: types[key] for key in kernel.arg_names if key in types and key not in constants},
        constexprs={key: value for key, value in constants.items() if key in kernel.arg_names},
        divisible=divisible,
        options=options,
    )


def sample(
    logits: Tensor, table: SamplingTable, needs: SamplingNeeds, workspace: SamplingWorkspace, tokens: Tensor
) -> None:
    """The token each row takes, -1 where none is live or the row is inert.

    Two launches; five with ``needs.filters``; two more with ``needs.edits``, which write into ``logits`` and restore
    them. needs: what `SamplingNeeds.of` said, or more. logits: float32 [rows, vocab], unit stride in a row, of
    ``workspace``'s vocabulary and at most its rows, which do not overlap. tokens: int32 [rows]. ``table`` has at least
    as many rows as the logits; the rest are ignored.
    """
    variant = FILTERED if needs.filters else NOISY if needs.noise else GREEDY
    _run(variant, logits, workspace, tokens, table=table, needs=needs)


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
    """
    _run(CHILDREN, logits, workspace, ids, table=table, needs=needs, values=values)


def logprobs(
    logits: Tensor, tokens: Tensor, workspace: SamplingWorkspace, chosen: Tensor, ids: Tensor, values: Tensor
) -> None:
    """log softmax of the logits as they are: of ``tokens`` int32 [rows], and of the best ``top`` per row.

    chosen: float64 [rows], -inf where the token is -1; ids: int32 [rows, top], top 0 to 64, by falling probability,
    -1 beyond the last; values: float64 [rows, top]. Five launches. logits and workspace: as in `sample`.
    """
    _run(LOGPROBS, logits, workspace, ids, values=values, tokens=tokens, chosen=chosen)


def _run(
    variant: SamplingVariant,
    logits: Tensor,
    workspace: SamplingWorkspace,
    ids: Tensor,
    *,
    table: SamplingTable | None = None,
    needs: SamplingNeeds = NO_NEEDS,
    values: Tensor | None = None,
    tokens: Tensor | None = None,
    chosen: Tensor | None = None,
) -> None:
    rows, vocab = logits.shape
    if rows == 0:
        return
    masks, width, edited = needs.masks, ids.shape[1] if variant.wide else 1, table if needs.edits else None
    if edited is not None:
        apply_edits_kernel[(rows,)](
            logits, edited.edits, edited.pool, edited.saved,
            edited.repetition, edited.inverse_repetition, edited.presence, edited.frequency,
            logits.stride(0), vocab, BLOCK=EDIT_BLOCK, **launch_options(EDIT, logits.device),
        )  # fmt: skip
    plan, stride, w = workspace.plan, logits.stride(0), workspace
    absent = _absent(variant, masks)
    columns = ("temperature", *_NOISE, *_FILTERS, *_MASKS)
    t = {name: None if name in absent else getattr(table, name) for name in columns}
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
            MASK=masks, GROUPS=plan.groups, GROUP=plan.group, **launch_options(MAXIMA, logits.device),
        )  # fmt: skip
        bounds_kernel[(rows,)](
            heat, *filters, w.maxima, peak, bound, plan.splits * plan.groups, vocab,
            FILTERS=variant.filters, GROUP=plan.group, BLOCKS=plan.segments * plan.groups,
            **launch_options(BOUNDS, logits.device),
        )  # fmt: skip
    scan_kernel[grid](
        logits, heat, *noise, *filters, t["log_min_p"], *mask, peak, bound, w.places, w.counts, weights,
        stride, vocab, max(width, 1),
        NOISE=variant.noise, FILTERS=variant.filters, WIDE=variant.wide, MASK=masks,
        GROUPS=plan.groups, GROUP=plan.group, **launch_options(SCAN, logits.device),
    )  # fmt: skip
    if variant.needs_peak:
        shorten_kernel[(rows,)](
            logits, heat, *noise, *filters, t["log_min_p"], peak, w.places, spare, w.counts, weights,
            stride, vocab, width, plan.splits,
            NOISE=variant.noise, FILTERS=variant.filters, WIDE=variant.wide,
            TOKENS=plan.tokens, SPLITS=plan.segments, COLUMNS=plan.columns(False),
            **launch_options(SHORTEN, logits.device),
        )  # fmt: skip
    choose_kernel[(rows,)](
        logits, heat, *noise, peak if variant.wide else None, w.places, w.counts, weights if variant.wide else None,
        tokens, chosen, ids, values, stride, vocab, width, plan.splits,
        NOISE=variant.noise, WIDE=variant.wide,
        TOKENS=plan.tokens, SPLITS=plan.segments, COLUMNS=plan.columns(True),
        **launch_options(CHOOSE, logits.device),
    )  # fmt: skip
    if edited is not None:
        undo_edits_kernel[(rows,)](
            logits, edited.edits, edited.pool, edited.saved, logits.stride(0), vocab,
            BLOCK=EDIT_BLOCK, **launch_options(EDIT, logits.device),
        )  # fmt: skip
