"""The interpreter, made quick for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.gpu.quick_interpreter import quick_interpreter


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_interpreter():
        yield
