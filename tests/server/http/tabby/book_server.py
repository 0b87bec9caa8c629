"""A server over the book engine, and Tabby's requests to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


def reached(server: Server) -> Counter[str]:
    """Outcomes of suggestions so far."""
    return server.serving.models.first.outcomes.metrics.suggestion_outcomes.copy()
