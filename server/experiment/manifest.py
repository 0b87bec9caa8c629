"""What an experiment's folder says about the run: its plan, and where and with what it ran."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, ValidationError

from server.experiment.config.experiment_config import ExperimentConfig
from server.experiment.config.strict_model import StrictModel
from server.experiment.experiment_errors import ExperimentError

_NAME = "manifest.json"


class Manifest(StrictModel):
    """Written once, when the experiment begins. ``facts`` are shown as they are: hardware, commit, model."""

    config: ExperimentConfig
    started: str = Field("", description="ISO 8601")
    facts: dict[str, str] = Field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Put it into ``folder``, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / (_NAME + ".new")
        draft.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        os.replace(draft, folder / _NAME)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises ExperimentError: there is none, or it is not one."""
        path = folder / _NAME
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ExperimentError(f"{path}: can not be read ({error.strerror}); give an experiment's folder") from None
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ExperimentError(f"{path}: {problems}") from None
