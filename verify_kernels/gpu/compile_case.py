"""One specialisation of a kernel that the engine can launch, described so that it compiles without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CompileCase:
    """``signature``: triton types by argument name ("*bf16", "*i32", "i32", "fp32"), constexpr arguments left out.

    ``constexprs``: value by constexpr argument name. ``divisible``: arguments that are multiples of 16 (pointers of
    torch tensors are, most strides too), which lets triton emit wide loads. ``options``: num_warps, num_stages and
    other compile options. ``targets``: substrings of the targets it is meant for; empty: all.
    ``resident``: blocks of threads that are meant to share a multiprocessor.
    """

    name: str
    kernel: Any  # triton's JITFunction, which has no public type
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ()
    resident: int = 1
