"""Kernel launches noted instead of made, and the compile cases that they would run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from verify_kernels.gpu.kernel_launch import CompileCase, chip_of, launch_options

INTERPRETED = chip_of(torch.device("cpu"))  # the chip whose options launches of the interpreter have

TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "i1",
}  # fmt: skip
BY_DEVICE = ("ASM",)  # constants that a launcher takes from the tensors' device, which here is no GPU


@dataclass(frozen=True, slots=True)
class RecordedLaunch:
    """``arguments`` by name; ``options``: num_warps and the like."""

    kernel: Any
    grid: tuple[Any, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def is_compiled_by(self, case: CompileCase) -> bool:
        """Whether triton would run ``case``'s binary for this launch."""
        if case.kernel is not self.kernel or launch_options(case.options, INTERPRETED) != self.options:
            return False
        known = self.arguments.keys() == case.signature.keys() | case.constexprs.keys()
        return known and all(_fits(case, name, value) for name, value in self.arguments.items())

    def describe(self) -> str:
        """In one line: the kernel with its constants, types and options."""
        values = {
            name: TYPES[value.dtype] if isinstance(value, Tensor) else value for name, value in self.arguments.items()
        }
        return f"{self.kernel.__name__} {values} {self.options}"


def _fits(case: CompileCase, name: str, value: Any) -> bool:
    if name in BY_DEVICE:
        return True
    if name in case.constexprs:
        return bool(case.constexprs[name] == value)
    kind = case.signature[name]
    if value is None:
        return kind[0] == "*"  # other arguments only make the kernel smaller
    if isinstance(value, Tensor):
        return kind == "*" + TYPES[value.dtype]
    if isinstance(value, int) and not isinstance(value, bool):
        return kind == "i32" and -(2**31) <= value < 2**31 and (name not in case.divisible or value % 16 == 0)
    return isinstance(value, float) and kind == "fp32"


@contextmanager
def recorded_launches() -> Iterator[list[RecordedLaunch]]:
    """Launches made in here run nothing and are appended to the list."""
    found: list[RecordedLaunch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        names: Iterable[str] = kernel.arg_names
        arguments = dict(zip(names, args, strict=False)) | {k: v for k, v in named.items() if k in names}
        options = {key: value for key, value in named.items() if key not in names}
        found.append(RecordedLaunch(kernel, grid(arguments) if callable(grid) else grid, arguments, options))

    with mock.patch.object(InterpretedFunction, "run", run), mock.patch.object(JITFunction, "run", run):
        yield found
