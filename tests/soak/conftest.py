"""The duration of the long soak: as a pytest option, if only this folder is run."""

from __future__ import annotations

import pytest

MINUTES = 5.0  # of `make test-slow`: too short to judge growth


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option for `make soak`; a run of the whole suite does not register it."""
    parser.addoption("--soak-minutes", type=float, default=MINUTES, help="duration of the slow test")


@pytest.fixture
def minutes(request: pytest.FixtureRequest) -> float:
    """The duration of the long soak."""
    return float(request.config.getoption("--soak-minutes", MINUTES))
