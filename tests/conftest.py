"""Shared test set-up: one torch thread, deterministic hypothesis profiles, Triton's interpreter without a GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
# As the command sets it: else gRPC's handlers of fork may abort a child before it runs its program.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

torch.set_num_threads(1)
CHECKS = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)
# The suite uses the same examples everywhere, so that a failure is due to a change. `make explore` draws new ones each
# time.
settings.register_profile("specdec", deadline=None, derandomize=True, suppress_health_check=CHECKS)
settings.register_profile("explore", deadline=None, print_blob=True, suppress_health_check=CHECKS)
settings.load_profile("specdec")
# Workers take whole files: the long ones first, or one worker ends alone with them.
LONG = ("tests/bench/path_identity/", "tests/engine/", "tests/kernels/gpu/", "tests/training/")
# With a GPU these run on it
ON_GPU = ("tests/kernels/gpu/", "tests/models/device/", "tests/engine/test_device_engine.py")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, others in collection order. Tests that run on the available GPU get its marker."""
    if torch.cuda.is_available():
        for item in items:
            if item.nodeid.startswith(ON_GPU) and not item.get_closest_marker("slow"):
                item.add_marker("gpu")
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.fixture(scope="session", autouse=True)
def temporary_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Those of `tempfile` lie beside `tmp_path`, so that pytest deletes them after three runs."""
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.getbasetemp())
    yield
    tempfile.tempdir = before
