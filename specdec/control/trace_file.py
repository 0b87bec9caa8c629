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
            # Lives as long as the engine.
            self._file = open(path.expanduser(), "w", buffering=1 << 16, encoding="utf-8")  # noqa: SIM115
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
        ConfigError: the file can not be read, or is no trace of this version; also while the steps are read, at a
            line that is no step.
    """
    try:
        with open(path, encoding="utf-8") as file:
            header = json.loads(file.readline() or "null")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: can not be read as a trace ({error})") from None
    if not isinstance(header, dict) or header.get("specdec_trace") != VERSION:
        raise ConfigError(f"{path}: is no decision trace of version {VERSION}; write one with --trace-file")
    if not isinstance(header.get("controller"), dict):
        raise ConfigError(f"{path}: line 1 does not say what the controller was built from; the file was altered")
    return header["controller"], _steps(path)


def _steps(path: Path) -> Iterator[StepTrace]:
    with open(path, encoding="utf-8", errors="replace") as file:
        next(file)
        for number, line in enumerate(file, 2):
            try:
                values = json.loads(line)
            except ValueError:
                # Lines are written whole, so only a crash leaves one without its end, and nothing comes after it.
                if line.endswith("\n"):
                    raise ConfigError(f"{path}: line {number} is no JSON; the file was altered") from None
                return
            yield _step(values, f"{path}: line {number}")


def _step(values: Any, where: str) -> StepTrace:
    try:
        drafters = [DrafterTrace(**drafter) for drafter in values["drafters"]]
        return StepTrace(**(values | {"drafters": drafters}))
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{where} is no step of a trace ({error})") from None
