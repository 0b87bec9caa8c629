"""Log records as text for people."""

from __future__ import annotations

import logging
from typing import Any

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127) if code not in (9, 10)}


class TextLines(logging.Formatter):
    """Time, level, logger and message, then ``name=value`` for each of the record's ``fields``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """As lines; control characters are spelled out, so that nobody's header can write to a terminal."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        said = " ".join(f"{name}={_value(value)}" for name, value in fields.items())
        return f"{super().format(record)} {said}".rstrip().translate(_CONTROL)


def _value(value: Any) -> str:
    text = f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return repr(text) if not text or any(c.isspace() for c in text) else text
