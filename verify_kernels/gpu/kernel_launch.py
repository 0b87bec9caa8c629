"""What launchers share: chips and launch options, waits, a step's rows, and cases to compile ahead of time.

A launcher does not check its tensors. The caller guarantees what its docstring says of them, and that they lie on one
device, are contiguous where nothing else is said, and, if floating-point, start at a multiple of 16 bytes: for others
triton picks another layout, and with it another order of additions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HALF_TYPES = (torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0  # the largest finite e4m3 value


def supports_fp8(device: torch.device, capability: tuple[int, int]) -> bool:
    """Whether a GPU has float8 e4m3 and at least this CUDA compute capability; AMD's MI300 has another float8."""
    return not torch.version.hip and torch.cuda.get_device_capability(device) >= capability


CHIPS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")  # chips with tiles of their own
SMALL = ("sm_89", "sm_120")  # those with 99 KiB of shared memory per program


@cache
def chip_of(device: torch.device) -> str:
    """The one of `CHIPS` whose tiles ``device`` uses; the CPU, on which kernels are interpreted, uses the H200's."""
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    if major == 8:
        return "sm_80" if minor in (0, 7) else "sm_89"
    return {9: "sm_90", 12: "sm_120"}.get(major, "sm_100")


OWN_OPTIONS = {"maxnreg": "cuda", "waves_per_eu": "hip"}  # launch options that the other backend refuses
PDL_CHIPS = ("sm_90", "sm_100", "sm_120")  # chips with programmatic dependent launch, see `await_only`


def launch_options(options: Mapping[str, Any], on: torch.device | str) -> dict[str, Any]:
    """``options`` as a device, or one of `CHIPS`, takes them; on `PDL_CHIPS` the launch may begin early."""
    chip = on if isinstance(on, str) else chip_of(on)
    backend = "hip" if chip.startswith("gfx") else "cuda"
    own = {name: value for name, value in options.items() if OWN_OPTIONS.get(name, backend) == backend}
    return own | {"launch_pdl": True} if chip in PDL_CHIPS else own


def specialised_on(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """As `triton.jit`, for a kernel that is compiled for the alignment of arguments ``names`` alone.

    Triton would compile it anew for each set of pointers and integers that are multiples of 16.
    """

    def decorate(kernel: Callable[..., Any]) -> Any:
        arguments = [p for p in inspect.signature(kernel).parameters.values() if p.annotation is p.empty]
        return triton.jit(kernel, do_not_specialize=[p.name for p in arguments if p.name not in names])

    return decorate


def await_only(_semantic: Any = None) -> None:
    """In a kernel: wait until the launch before this one has ended, and with it all earlier ones.

    A kernel waits before its first store, and before it reads what the launch just before it wrote; torch's operations
    are launches too. It may read before it waits what older launches wrote: it begins only after the launch before it
    has waited. This hides the time that a kernel takes to start, and that of such reads.
    """
    if _semantic is not None and getattr(_semantic.builder.options, "launch_pdl", False):
        gdc_wait(_semantic=_semantic)


def release_next(_semantic: Any = None) -> None:
    """In a kernel that has waited: let the next launch begin once every program has come here or has ended."""
    if _semantic is not None and getattr(_semantic.builder.options, "launch_pdl", False):
        gdc_launch_dependents(_semantic=_semantic)


def exchange(_semantic: Any = None) -> None:
    """In a kernel: a barrier after which a program's threads see what the others have stored in global memory.

    AMD's barrier waits for no load or store that is under way, so that each thread waits for its own before it.
    """
    if _semantic is None:  # interpreted, where a program is one thread
        return
    if _semantic.builder.options.backend_name == "hip":
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1", "=v,v,~{memory}", [_semantic.to_tensor(0)], tl.int32,
            is_pure=False, pack=1, _semantic=_semantic,
        )  # fmt: skip
    tl.debug_barrier(_semantic=_semantic)


for _function in (await_only, release_next, exchange):
    _function.__dict__["__triton_builtin__"] = True  # what triton's own functions of a kernel have

FEW_ROWS = tl.constexpr(32)  # up to which `await_before_linear` releases the next launch


@triton.jit  # so that the order is part of the key of Triton's cache
def await_previous() -> None:
    """In a kernel: `await_only`, then `release_next`."""
    await_only()
    release_next()


@triton.jit
def await_before_linear() -> None:
    """In a short kernel with a program per row, in front of a linear layer: wait, and with few rows release.

    With many rows the kernel releases near its end. Earlier, its programs would still hold multiprocessors when those
    of the linear layer are placed, and these would share the other multiprocessors.
    """
    await_only()
    if tl.num_programs(0) <= FEW_ROWS:
        release_next()


@dataclass(frozen=True, slots=True)
class StepRows:
    """Where a step's rows stand: int32 arrays on the device, over B entries and N rows, padding included."""

    entry_of: Tensor  # [N] entry of each row; -1 for padding
    entry_start: Tensor  # [B + 1] first row of each entry; rows from the last of these on are padding
    entry_ctx: Tensor  # [B] filled slots; row i of an entry lies at its slot ctx + i
    parent: Tensor  # [N] parent's row of the same entry; -1 for an entry's first
    depth: Tensor  # [N] position less ctx
    page_table: Tensor  # [B, max_pages] page ids


# The types of arguments whose names have one meaning in all kernels
_NAMES = {
    "*i32": (
        "entry_of entry_start entry_ctx parent parent_ptr depth depth_ptr page_table leaf_of_ptr has_child_ptr "
        "diverge_ptr top_ptr path_ptr path path_works last_tile work_list header root_row sampled sample_start emitted "
        "n_moves move_source move_target source target counter top_k mask_begin mask_words pool counts tokens ids edits"
    ),
    "*fp32": (
        "cos sin partials peaks partial x_scale w_scale scale_out logits temperature log_min_p maxima peak bound saved "
        "repetition presence frequency"
    ),
    "*fp64": "top_p inverse inverse_repetition chosen values",
    "*i64": "seed position weights",
    "*i16": "places spare",
    "fp32": "eps factor",
}
ARGUMENT_TYPES = {name: kind for kind, names in _NAMES.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class CompileCase:
    """One way to compile a kernel ahead of time."""

    name: str
    kernel: Any  # triton's JITFunction, which has no public type
    signature: Mapping[str, str]  # triton types by argument ("*bf16", "*i32", "i32", "fp32"), without constexprs
    constexprs: Mapping[str, Any]
    divisible: tuple[str, ...] = ()  # integers that are multiples of 16, for which triton emits wide loads
    options: Mapping[str, Any] = field(default_factory=dict)  # num_warps, num_stages and other compile options
    targets: tuple[str, ...] = ()  # substrings of the targets that it is meant for; empty: all
    resident: int = 1  # blocks of threads that are meant to share a multiprocessor

    @staticmethod
    def of(
        name: str, kernel: Any, constexprs: Mapping[str, Any], types: Mapping[str, str] | None = None, **more: Any
    ) -> CompileCase:
        """The case whose signature is ``types``, then `ARGUMENT_TYPES`; arguments that neither has are "i32"."""
        known = {**ARGUMENT_TYPES, **(types or {})}
        signature = {name: known.get(name, "i32") for name in kernel.arg_names if name not in constexprs}
        return CompileCase(name, kernel, signature, constexprs, **more)
