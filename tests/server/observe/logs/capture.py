"""The log of a server, as lines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from server.observe.logs import JsonLines, configure_logs


class Lines:
    """Everything that was logged since, parsed."""

    def __init__(self, stream: io.StringIO) -> None:
        self._stream = stream

    @property
    def text(self) -> str:
        """As it was written."""
        return self._stream.getvalue()

    @property
    def all(self) -> list[dict[str, Any]]:
        """Every line; each must be valid JSON."""
        return [json.loads(line) for line in self.text.splitlines()]

    def of(self, message: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the lines of the call log with this ``message`` and these ``fields``."""
        own = [line for line in self.all if (line["logger"], line["message"]) == ("specdec.calls", message)]
        return [line for line in own if fields.items() <= line.items()]


@contextmanager
def logged(kind: Literal["auto", "json", "text"] = "json", level: int = logging.DEBUG) -> Iterator[Lines]:
    """All logging of this process goes to the lines given."""
    root, stream = logging.getLogger(), io.StringIO()
    before, handlers = root.level, root.handlers[:]
    for handler in handlers:
        root.removeHandler(handler)
    try:
        configure_logs(kind, level, stream)
        yield Lines(stream)
    finally:
        for handler in root.handlers[:]:
            root.removeHandler(handler)
        for handler in handlers:
            root.addHandler(handler)
        root.setLevel(before)


def format_one(message: str, **fields: Any) -> dict[str, Any]:
    """A record, formatted as JSON and read again."""
    record = logging.LogRecord("l", logging.INFO, "f", 1, message, (), None)
    record.fields = fields
    found: dict[str, Any] = json.loads(JsonLines().format(record))
    return found
