"""A server whose model completes the middle of one book, for all tests of a worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.http.harness import Server
from tests.server.http.tabby.book_server import book_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """It is ready."""
    with book_server() as found:
        yield found
