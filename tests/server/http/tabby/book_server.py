"""A server over the book engine, and Tabby's requests to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from server.completion.service import Acceptance
from tests.fake_engine import BOOK, BOOKS
from tests.server.completion.code_tokenizer import CodeTokenizer
from tests.server.completion.editor import AT, BEHIND
from tests.server.http.harness import Server, running

COMPLETIONS, EVENTS = "/v1/completions", "/v1/events"


@contextmanager
def book_server(tokenizer: Callable[[], Any] = CodeTokenizer, **config: Any) -> Iterator[Server]:
    """It is ready."""
    with running(tokenizer, factory=BOOKS, **config) as server:
        yield server


def segments(**more: Any) -> dict[str, Any]:
    """The book without one line."""
    return {"prefix": BOOK[:AT], "suffix": "\n" + BOOK[BEHIND:], **more}


def body(**more: Any) -> dict[str, Any]:
    """A completion of that line."""
    return {"language": "python", "segments": segments(), **more}


def total(server: Server) -> Acceptance:
    """How suggestions were received so far."""
    return server.serving._grpc.completion.outcomes.total
