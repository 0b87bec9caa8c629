"""Gives Triton's interpreter a dot product whose rows do not depend on each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def exact_dot() -> Iterator[None]:
    """The interpreter multiplies float32 tiles with the host's BLAS, which on some processors sums a row in another
    order when its neighbours differ: tests of a kernel's bits would test that library. In float64 the products of
    16-bit numbers are exact and the sums so close that they round to the same float32 in any order. Compiled kernels
    are not touched: other versions of Triton have other internals."""
    if torch.cuda.is_available():
        yield
        return
    builder = interpreter.InterpreterBuilder
    original = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        left, right = _values(a), _values(b)
        if d.data.dtype != np.float32 or left.dtype not in (np.float16, np.float32):
            return original(self, a, b, d, *rest)
        product = np.matmul(left, right, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    with mock.patch.object(builder, "create_dot", create_dot):
        yield


def _values(handle: Any) -> Any:
    """A tile as numbers; the interpreter keeps 8-bit floats as bytes."""
    if handle.dtype.primitive_bitwidth != 8 or not handle.dtype.is_floating():
        return handle.data
    return interpreter._convert_float(handle.data, handle.dtype, tl.float16, None).view(np.float16)
