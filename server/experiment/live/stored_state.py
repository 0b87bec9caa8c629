"""What an experiment's folder says about whether it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from server.experiment.config.strict_model import StrictModel
from server.experiment.experiment_errors import ExperimentError

State = Literal["running", "stopped", "finished", "failed"]
_NAME = "state.json"


class StoredState(StrictModel):
    """`running` also when the server that ran it is gone: the next one goes on. ``at``: ISO 8601, since when.
    ``records``: by arm, as of then."""

    state: State
    at: str
    reason: str = ""
    records: dict[str, int] = Field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Put it into ``folder``, whole or not at all. Raises OSError."""
        draft = folder / (_NAME + ".new")
        draft.write_text(self.model_dump_json() + "\n", encoding="utf-8")
        os.replace(draft, folder / _NAME)

    @classmethod
    def read(cls, folder: Path) -> StoredState | None:
        """None: the folder has none.

        Raises:
            ExperimentError: it can not be read.
        """
        path = folder / _NAME
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise ExperimentError(f"{path}: can not be read ({error}); move the folder away") from None
