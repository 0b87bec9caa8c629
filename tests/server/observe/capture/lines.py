"""The lines in a folder of captures, as they were written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from server.observe.capture import CAPTURE_FILES


def captured_lines(folder: Path) -> list[dict[str, Any]]:
    """Every line, file by file."""
    return [json.loads(line) for path in CAPTURE_FILES.paths(folder) for line in path.read_bytes().splitlines()]
