"""The number of trials: as pytest options, if only this folder is run."""

from __future__ import annotations

import pytest

MANY = 10_000


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options for `make fuzz`; a run of the whole suite does not register them."""
    parser.addoption("--fuzz-count", type=int, default=MANY, help="bodies or messages per endpoint, of the slow tests")
    parser.addoption("--fuzz-seed", type=int, default=1, help="another one tries others")


@pytest.fixture
def many(request: pytest.FixtureRequest) -> int:
    """Inputs per endpoint."""
    return int(request.config.getoption("--fuzz-count", MANY))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of the random inputs."""
    return int(request.config.getoption("--fuzz-seed", 1))
