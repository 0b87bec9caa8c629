"""The folder of one experiment: manifest, plan, state and records."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from server.experiment.config import ExperimentConfig, StrictModel
from server.experiment.records import RECORD_FILES, ExperimentError, RecordLog, count_records, read_records
from specdec.atomic_file import replacing
from specdec.config import problems, read_text
from specdec.errors import ConfigError

_MANIFEST, _STATE, _PLAN = "manifest.json", "state.json", "plan.yaml"


def _with_zone(text: str) -> str:
    if text and datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("the time has no zone")
    return text


Moment = Annotated[str, AfterValidator(_with_zone)]
"""ISO 8601 with a time zone, or empty."""


class Manifest(StrictModel):
    """Written once, when the experiment begins."""

    config: ExperimentConfig
    started: Moment = ""
    facts: dict[str, str] = Field(default_factory=dict, description="shown in the report: hardware, commit, model")

    @property
    def started_s(self) -> float:
        return datetime.fromisoformat(self.started).timestamp()


State = Literal["running", "stopped", "finished", "failed"]


class StoredState(StrictModel):
    """The state of an experiment. `running` survives the end of the server: the next server resumes the experiment."""

    state: State
    at: Moment  # since when
    reason: str = ""
    records: dict[str, int] = Field(default_factory=dict)  # by arm, as of `at`
    ran_s: float = 0.0  # how long it ran before `at`, stops excluded

    @property
    def spent_s(self) -> float:
        """How long the experiment has run until now. If it is `running`, the time since ``at`` counts, also while its
        server was down; none does if the clock was set back behind it."""
        if self.state != "running":
            return self.ran_s
        return self.ran_s + max(0.0, (datetime.now(UTC) - datetime.fromisoformat(self.at)).total_seconds())


@dataclass(frozen=True)
class ExperimentFolder:
    """Methods may block on the disk, and raise ExperimentError if it fails."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether an experiment began here."""
        return (self.path / _MANIFEST).exists()

    def manifest(self) -> Manifest:
        path = self.path / _MANIFEST
        try:
            # Those of earlier versions may name fields that plans no longer have.
            return Manifest.model_validate_json(path.read_bytes(), extra="ignore")
        except OSError as error:
            raise ExperimentError(f"{path}: cannot be read ({error.strerror}); give an experiment's folder") from None
        except ValidationError as error:
            found = problems(error, Manifest)
            raise ExperimentError(f"{path}: {found}; move the folder away if you do not need it") from None

    def state(self) -> StoredState:
        """Its state; `stopped` if there is none, as in a copied folder."""
        path = self.path / _STATE
        try:
            return StoredState.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return StoredState(state="stopped", at="", reason="it never ran here", records=self.written())
        except (OSError, ValidationError) as error:
            found = problems(error, StoredState) if isinstance(error, ValidationError) else error.strerror
            raise ExperimentError(f"{path}: cannot be read ({found}); delete it, which stops the experiment") from None

    def plan_text(self) -> str:
        path = self.path / _PLAN
        try:
            return read_text(path, f"{path}:")
        except ConfigError as error:
            raise ExperimentError(str(error)) from None

    def begin(self, text: str, manifest: Manifest) -> None:
        self._replace(_PLAN, text)
        self.write_manifest(manifest)

    def write_manifest(self, manifest: Manifest) -> None:
        self._replace(_MANIFEST, manifest.model_dump_json(indent=2) + "\n")

    def note(self, state: StoredState) -> None:
        self._replace(_STATE, state.model_dump_json() + "\n")

    def _replace(self, name: str, text: str) -> None:
        """Replace one file atomically; the folder is created if missing."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with replacing(self.path / name) as file:
                file.write(text.encode())
        except (OSError, UnicodeEncodeError) as error:
            raise ExperimentError(
                f"{self.path}: cannot be written ({error}); free some space, or choose another folder"
            ) from None

    @property
    def runs(self) -> int:
        """The number of runs that wrote records here."""
        return len(RECORD_FILES.paths(self.path))

    def log(self) -> RecordLog:
        """Its records; empty if no run wrote any."""
        return read_records(self.path) if self.runs else RecordLog()

    def written(self) -> dict[str, int]:
        """Records by arm."""
        return dict(count_records(self.path))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold an exclusive lock. The system releases it when the process ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise ExperimentError(
                f"{self.path}: cannot be used ({error.strerror}); give another folder with --out"
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ExperimentError(
                f"{self.path}: another process runs this experiment; wait, or give another --out"
            ) from None
        try:
            yield
        finally:
            os.close(handle)


def difference(then: Any, now: Any, place: str) -> str:
    """The first place at which two JSON values differ, with both values; empty if they are equal."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in dict.fromkeys((*then, *now)):
            found = difference(then.get(key), now.get(key), f"{place}.{key}")
            if found:
                return found
        return ""
    return "" if then == now else f"{place} was {then!r} and is {now!r}"


def now_text() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
