"""Launches as an engine makes them: none waits for the device, all fit a grid, and each is one that is compiled."""

from __future__ import annotations

import importlib
import inspect
from unittest import mock

import pytest
import torch

from tests.kernels.gpu.engine_launches import ENGINE_LAUNCHES
from tests.kernels.gpu.no_host_read import NoHostRead
from tests.kernels.gpu.recorded_launches import RecordedLaunch, recorded_launches
from verify_kernels.gpu.aot.jobs import KERNEL_MODULES, load_cases
from verify_kernels.gpu.sampling_table import SamplingTable

MAX_GRID = (2**31 - 1, 65535, 65535)


def launches_of(name: str, place: str) -> list[RecordedLaunch]:
    rule = NoHostRead(place)
    within = rule.paused()(SamplingTable.within)  # a table also has views of the host's memory
    with mock.patch.object(SamplingTable, "within", within), recorded_launches() as found, rule:
        ENGINE_LAUNCHES[name](torch.device(place))
    return found


def test_every_launcher_is_listed() -> None:
    found = set()
    for module in map(importlib.import_module, KERNEL_MODULES):
        functions = inspect.getmembers(module, inspect.isfunction)
        own = [name for name, function in functions if function.__module__ == module.__name__]
        found |= {f"{module.__name__.rpartition('.')[2]}.{name}" for name in own if name[0] != "_"}
    found = {name for name in found if not name.endswith(".compile_cases")}
    assert found == set(ENGINE_LAUNCHES)


@pytest.mark.parametrize("place", ["meta", "cpu"])
@pytest.mark.parametrize("name", ENGINE_LAUNCHES)
def test_launchers_do_not_read_the_device(name: str, place: str) -> None:
    found = launches_of(name, place)
    assert found
    for launch in found:
        assert all(type(size) is int and 1 <= size <= most for size, most in zip(launch.grid, MAX_GRID, strict=False))


@pytest.mark.parametrize("name", ENGINE_LAUNCHES)
def test_every_launch_has_a_compiled_case(name: str) -> None:
    cases = [case for module in KERNEL_MODULES for case in load_cases(module)]
    stray = [launch.describe() for launch in launches_of(name, "cpu") if not any(map(launch.is_compiled_by, cases))]
    assert stray[:3] == []
