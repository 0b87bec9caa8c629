"""An option of the editors' tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options for the folders of plugins that no package registry has."""
    parser.addoption("--llama-vim", default=None, help="a checkout of llama.vim, for the test that runs it")
