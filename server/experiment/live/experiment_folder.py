"""The folder of one experiment: its plan as it was sent, its manifest, its state, its records."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from server.experiment.config.experiment_config import ExperimentConfig
from server.experiment.experiment_errors import ExperimentError
from server.experiment.live.stored_state import StoredState
from server.experiment.manifest import Manifest
from server.experiment.record_log import read_records
from server.experiment.record_segments import segments

_PLAN = "plan.yaml"


@dataclass(frozen=True)
class ExperimentFolder:
    """Every method may wait for the disk, and raises ExperimentError where that does not do."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether an experiment was ever begun here."""
        return (self.path / "manifest.json").exists()

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
            raise ExperimentError(f"{self.path / _PLAN}: can not be read ({error})") from None

    def begin(self, config: ExperimentConfig, text: str, facts: dict[str, str]) -> None:
        """Note what is begun now."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            draft = self.path / (_PLAN + ".new")
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, self.path / _PLAN)
            Manifest(config=config, started=now_text(), facts=facts).write(self.path)
        except (OSError, UnicodeEncodeError) as error:
            raise ExperimentError(f"{self.path}: can not be written ({error}); look at server.experiments") from None

    def note(self, state: StoredState) -> None:
        """Note its state."""
        try:
            state.write(self.path)
        except OSError as error:
            raise ExperimentError(f"{self.path}: can not be written ({error}); free some space") from None

    def written(self) -> dict[str, int]:
        """Records by arm, each request once."""
        if not segments(self.path):
            return {}
        return dict(Counter(record.arm for record in read_records(self.path).records))


def now_text() -> str:
    """The time, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
