"""The sampler's launches: rows of logits on the device to tokens, children and log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

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

# What kernels read of a `SamplingTable` and of a `SamplingWorkspace`, by the names that they have there
_NOISE = ("inverse", "seed", "position")
_FILTERS = ("top_k", "top_p", "log_min_p")
_MASKS = ("mask_begin", "mask_words", "pool")
_EDITS = ("edits", "saved", "repetition", "inverse_repetition", "presence", "frequency")
_COLUMNS = ("temperature", *_NOISE, *_FILTERS, *_MASKS, *_EDITS)
_SCRATCH = ("places", "spare", "counts", "weights", "maxima", "peak", "bound")


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


class SamplingLaunch(NamedTuple):
    """A launch of one of the kernels."""

    kernel: Any  # triton's JITFunction, which has no public type
    constants: dict[str, Any]  # constexprs, and None for arguments that the kernel does not get
    options: dict[str, Any]
    by_split: bool = False  # a program for each split of a row, else one for each row


APPLY_EDITS = SamplingLaunch(apply_edits_kernel, {"BLOCK": EDIT_BLOCK}, EDIT)
UNDO_EDITS = SamplingLaunch(undo_edits_kernel, {"BLOCK": EDIT_BLOCK}, EDIT)


@cache  # drafts are sampled without a graph, level by level
def _launches(variant: SamplingVariant, plan: SamplingPlan, *, masks: bool, edits: bool) -> list[SamplingLaunch]:
    """A variant's launches, in order; masks, edits: whether a row may have them."""
    absent = [] if variant.noise else [*_NOISE]
    absent += [] if variant.filters else [*_FILTERS, "bound", "spare"]
    absent += [] if masks else _MASKS
    absent += [] if variant.needs_peak else ["peak", "weights"]
    absent += [] if variant.wide else ["values"]
    absent += ["temperature"] if variant == LOGPROBS else ["tokens", "chosen"]
    known: dict[str, Any] = {
        "NOISE": variant.noise, "FILTERS": variant.filters, "WIDE": variant.wide, "MASK": masks,
        "GROUPS": plan.groups, "GROUP": plan.group, "BLOCKS": plan.segments * plan.groups,
        "TOKENS": plan.tokens, "SPLITS": plan.segments, "COLUMNS": plan.columns(False), **dict.fromkeys(absent),
    }  # fmt: skip

    def of(kernel: Any, options: dict[str, Any], by_split: bool = False) -> SamplingLaunch:
        own = {name: known[name] for name in kernel.arg_names if name in known}
        return SamplingLaunch(kernel, own, options, by_split)

    launches = [APPLY_EDITS] if edits else []
    if variant.needs_peak:
        launches += [of(maxima_kernel, MAXIMA, by_split=True), of(bounds_kernel, BOUNDS)]
    launches += [of(scan_kernel, SCAN, by_split=True)]
    if variant.needs_peak:
        launches += [of(shorten_kernel, SHORTEN)]
    known |= {"COLUMNS": plan.columns(True)} | ({} if variant.wide else dict.fromkeys(("peak", "weights")))
    launches += [of(choose_kernel, CHOOSE)]
    return [*launches, UNDO_EDITS] if edits else launches


def compile_cases() -> list[CompileCase]:
    """Cases of all kernels; rows of a vocabulary that is a multiple of 16 are read 16 bytes at a time.

    Plans that differ in what a kernel does not read give equal cases.
    """
    cases = [_case(each, "") for each in (APPLY_EDITS, UNDO_EDITS)]
    forms = [(variant, masks) for variant in VARIANTS for masks in (False, True) if variant != LOGPROBS or not masks]
    for size, (variant, masks) in product(SamplingPlan.SIZES, forms):
        plan = SamplingPlan(1, *size)
        name = f" {variant.name}{' masked' if masks else ''} {plan.tokens} x {plan.segments}"
        for each in _launches(variant, plan, masks=masks, edits=False):
            if each.by_split:
                cases += [_case(each, name, ("row_stride", "vocab")), _case(each, f"{name} odd")]
            else:
                cases.append(_case(each, name))
    return cases


def _case(each: SamplingLaunch, suffix: str, divisible: tuple[str, ...] = ()) -> CompileCase:
    name = f"sampling {each.kernel.__name__.removesuffix('_kernel')}{suffix}"
    return CompileCase.of(name, each.kernel, each.constants, divisible=divisible, options=each.options)


def sample(
    logits: Tensor, table: SamplingTable, needs: SamplingNeeds, workspace: SamplingWorkspace, tokens: Tensor
) -> None:
    """The token each row takes, -1 where none is live or the row is inert.

    Two launches; five with ``needs.filters``; two more with ``needs.edits``, which write into ``logits`` and restore
    them. needs: what `SamplingNeeds.of` said, or more. logits: float32 [rows > 0, vocab], unit stride in a row, of
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
    plan = workspace.plan
    given: dict[str, Any] = {
        "logits": logits, "row_stride": logits.stride(0), "vocab": vocab, "width": ids.shape[1] if variant.wide else 1,
        "splits": plan.splits, "blocks": plan.splits * plan.groups,
        "tokens": tokens, "chosen": chosen, "ids": ids, "values": values,
    }  # fmt: skip
    given |= {name: getattr(workspace, name) for name in _SCRATCH}
    given |= {} if table is None else {name: getattr(table, name) for name in _COLUMNS}
    launches = _launches(variant, plan, masks=needs.masks, edits=needs.edits)
    for kernel, constants, options, by_split in launches:
        named = given | constants
        kernel[(plan.splits, rows) if by_split else (rows,)](
            *[named[name] for name in kernel.arg_names], **launch_options(options, logits.device)
        )
