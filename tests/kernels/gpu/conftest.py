"""Runs kernels on a GPU if the machine has one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.gpu.quick_interpreter import quick_interpreter


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def quick_and_exact() -> Iterator[None]:
    """Kernels run faster in the interpreter, and their bits do not depend on the library it multiplies with."""
    with quick_interpreter():
        yield
