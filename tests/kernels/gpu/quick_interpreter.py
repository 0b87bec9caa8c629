"""Triton's interpreter, several times faster for kernels made of small functions, and exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels.gpu.exact_dot import exact_dot


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """The interpreter patches triton's language at each launch and at each call of a device function; here it does so
    once, until the end of the block. It also computes whether each sum and product of integers overflows, for an
    assertion that it makes in debug mode only; here it does not. Compiled kernels are not touched."""
    if torch.cuda.is_available():
        yield
        return
    patch: Callable[[Any], Any] = interpreter._patch_lang
    whole = FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})  # names visible to any device function
    active: list[tuple[Any, Callable[[], None]]] = []  # the patch and what takes it back

    def once(function: Any) -> Any:
        if not active:
            scope = patch(whole)
            active.append((scope, scope.restore))
            scope.restore = lambda: None
        return active[0][0]

    builder = interpreter.interpreter_builder
    options = builder.options if builder.options.debug else replace(builder.options, sanitize_overflow=False)
    with (
        exact_dot(),
        mock.patch.object(interpreter, "_patch_lang", once),
        mock.patch.object(builder, "options", options),
    ):
        try:
            yield
        finally:
            for _, restore in active:
                restore()
