"""Everything that an analysis found: what `result.json` holds and the report shows."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from server.experiment.analysis.arm_result import ArmResult
from server.experiment.analysis.curves import Curves
from server.experiment.analysis.guardrail_result import GuardrailResult
from server.experiment.analysis.target_result import TargetResult
from server.experiment.analysis.verdict import Verdict
from server.experiment.config.strict_model import StrictModel
from server.experiment.experiment_errors import ExperimentError


class Result(StrictModel):
    """Plain values only; the same records give the same result."""

    name: str
    mode: str
    rule: str
    alpha: float
    min_effect: float
    started: str
    facts: dict[str, str]
    verdict: Verdict
    primary: TargetResult
    decided_by: tuple[float | None, float | None]  # the interval of the ratio that the verdict rests on
    secondary: tuple[TargetResult, ...]
    table: tuple[TargetResult, ...]
    guardrails: tuple[GuardrailResult, ...]
    arms: tuple[ArmResult, ArmResult]
    sample_ratio_p: float
    sample_ratio_counts: tuple[int, int]
    sample_ratio_unit: str
    compared_outputs: int
    mismatched_outputs: int
    curves: Curves
    notes: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Result:
        """Raises ExperimentError: there is none, or it is of another version."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            message = f"{path}: can not be read ({error.strerror}); run `specdec ab analyze` first"
            raise ExperimentError(message) from None
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            message = (
                f"{path}: not a result of this version ({where}: {problem['msg']}); run `specdec ab analyze` again"
            )
            raise ExperimentError(message) from None
