"""The folder of one experiment: its manifest, plan, state and records, whoever runs it."""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from server.experiment.config import ExperimentConfig, StrictModel
from server.experiment.records import RECORD_FILES, ExperimentError, RecordLog, read_records

_MANIFEST, _STATE, _PLAN = "manifest.json", "state.json", "plan.yaml"


def _write_whole(path: Path, text: str) -> None:
    """All of it or nothing, whenever the process dies. Raises OSError, UnicodeEncodeError."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


class Manifest(StrictModel):
    """Written once, when the experiment begins. ``facts`` are shown as they are: hardware, commit, model."""

    config: ExperimentConfig
    started: str = Field("", description="ISO 8601")
    facts: dict[str, str] = Field(default_factory=dict)

    @property
    def started_s(self) -> float:
        """When it began, in Unix time."""
        return datetime.fromisoformat(self.started).timestamp()

    def write(self, folder: Path) -> None:
        """Put it into ``folder``, which is made if it is not there. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        _write_whole(folder / _MANIFEST, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises ExperimentError: there is none, or it is not one."""
        path = folder / _MANIFEST
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ExperimentError(f"{path}: cannot be read ({error.strerror}); give an experiment's folder") from None
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ExperimentError(f"{path}: {problems}") from None


State = Literal["running", "stopped", "finished", "failed"]


class StoredState(StrictModel):
    """`running` also when the server that ran it is gone: the next one goes on. ``at``: ISO 8601, since when.
    ``records``: by arm, as of then."""

    state: State
    at: str
    reason: str = ""
    records: dict[str, int] = Field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Put it into ``folder``, whole or not at all. Raises OSError."""
        _write_whole(folder / _STATE, self.model_dump_json() + "\n")

    @classmethod
    def read(cls, folder: Path) -> StoredState | None:
        """None: the folder has none.

        Raises:
            ExperimentError: it cannot be read.
        """
        path = folder / _STATE
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise ExperimentError(f"{path}: cannot be read ({error}); move the folder away") from None


@dataclass(frozen=True)
class ExperimentFolder:
    """Every method may wait for the disk, and raises ExperimentError where that does not do."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether an experiment was ever begun here."""
        return (self.path / _MANIFEST).exists()

    def manifest(self) -> Manifest:
        """Its plan, and when it began."""
        return Manifest.read(self.path)

    def state(self) -> StoredState:
        """Its state; `stopped` where nothing is said, as of a folder that was copied here."""
        return StoredState.read(self.path) or StoredState(state="stopped", at="", reason="it never ran here")

    def plan_text(self) -> str:
        """The plan as it was sent."""
        try:
            return (self.path / _PLAN).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ExperimentError(f"{self.path / _PLAN}: cannot be read ({error})") from None

    def begin(self, text: str, manifest: Manifest) -> None:
        """Note what is begun now; ``text``: the plan as it was sent."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            _write_whole(self.path / _PLAN, text)
            manifest.write(self.path)
        except (OSError, UnicodeEncodeError) as error:
            raise ExperimentError(f"{self.path}: cannot be written ({error}); look at server.experiments") from None

    def note(self, state: StoredState) -> None:
        """Note its state."""
        try:
            state.write(self.path)
        except OSError as error:
            raise ExperimentError(f"{self.path}: cannot be written ({error}); free some space") from None

    @property
    def runs(self) -> int:
        """How often somebody began to write records here."""
        return len(RECORD_FILES.paths(self.path))

    def log(self) -> RecordLog:
        """Its records; none where nobody began to write any."""
        return read_records(self.path) if self.runs else RecordLog()

    def written(self) -> dict[str, int]:
        """Records by arm, each request once."""
        return dict(Counter(record.arm for record in self.log().records))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else may lock it meanwhile. The system lets go of the lock when the process ends, in whatever way."""
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


def now_text() -> str:
    """The time, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
