"""One server for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.http.calls import Fim
from tests.server.http.harness import Server, running


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A ready server whose model supports chat, tools, and fill-in-the-middle."""
    with running(lambda: FakeTokenizer(has_tools=True), fim=Fim()) as found:
        yield found
