"""The decision trace on disk: JSON lines, a header first, then one line per step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError
from specdec.types import DrafterTrace, StepTrace

VERSION = 1


class TraceWriter:
    """Appends steps to a file that begins with what the controller was built from.

    Raises:
        ConfigError: the file can not be written.
    """

    def __init__(self, path: Path, controller: Mapping[str, Any]) -> None:
        try:
            self._file = open(path.expanduser(), "w", buffering=1 << 16)  # noqa: SIM115 - lives as long as the engine
        except OSError as error:
            raise ConfigError(f"engine.speculation.trace_file: can not write {path} ({error.strerror})") from None
        self._line({"specdec_trace": VERSION, "controller": dict(controller)})

    def write(self, step: StepTrace) -> None:
        """One step."""
        self._line(dataclasses.asdict(step))

    def close(self) -> None:
        """Nothing can be written any more."""
        self._file.close()

    def _line(self, value: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")) + "\n")


def read_trace(path: Path) -> tuple[dict[str, Any], Iterator[StepTrace]]:
    """The controller's description and the steps, read as they are asked for; a line cut short by a crash ends them.

    Raises:
        ConfigError: the file can not be read, or is no trace of this version.
    """
    try:
        with open(path) as file:
            header = json.loads(file.readline() or "null")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: can not be read as a trace ({error})") from None
    if not isinstance(header, dict) or header.get("specdec_trace") != VERSION:
        raise ConfigError(f"{path}: is no decision trace of version {VERSION}; write one with --trace-file")
    return header["controller"], _steps(path)


def _steps(path: Path) -> Iterator[StepTrace]:
    with open(path) as file:
        next(file)
        for line in file:
            try:
                values = json.loads(line)
            except ValueError:
                return
            drafters = [DrafterTrace(**drafter) for drafter in values.pop("drafters")]
            yield StepTrace(**values, drafters=drafters)
