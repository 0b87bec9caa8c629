"""Sets logging up for a server."""

from __future__ import annotations

import logging
import sys
from typing import Literal, TextIO

from server.logs.json_lines import JsonLines
from server.logs.text_lines import TextLines

LogFormat = Literal["auto", "json", "text"]


def configure_logs(kind: LogFormat, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Everything that is logged goes to ``stream`` (default: standard error); `auto` is text on a terminal, else JSON.

    What was set up before is replaced.
    """
    stream = stream or sys.stderr
    text = kind == "text" or (kind == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextLines() if text else JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
