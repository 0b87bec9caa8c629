"""Runs kernels on a GPU if the machine has one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.gpu.exact_dot import exact_dot


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def exact_sums() -> Iterator[None]:
    """The tests of a kernel's bits judge the kernel, not the library that the interpreter multiplies with."""
    with exact_dot():
        yield
