"""A number of a run that is compared: a metric, and which quantile of it, or its mean."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from server.experiment.config.strict_model import Share, StrictModel
from server.experiment.metrics import METRICS


class MetricTarget(StrictModel):
    """Written `ttft_ms@p95`, `tokens_per_step:mean`, or as a mapping. Without a quantile it is the mean."""

    metric: str
    quantile: float | None = Field(None, gt=0, lt=1)
    min_effect: Share = Field(0.02, ge=0, lt=1, description="ratios closer to 1 than this do not matter")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        name, at, quantile = value.partition("@p")
        if not at:
            return {"metric": name.removesuffix(":mean")}
        try:
            # through text: p99.9 is to be 0.999, not 0.9990000000000001
            return {"metric": name, "quantile": round(float(quantile) / 100, 9)}
        except ValueError:
            raise ValueError(f"{value!r}: write METRIC@pNN, as in ttft_ms@p95, or METRIC:mean") from None

    @model_validator(mode="after")
    def _is_known(self) -> MetricTarget:
        if self.metric not in METRICS:
            raise ValueError(f"no metric {self.metric!r}; there are {', '.join(METRICS)}")
        return self

    @property
    def label(self) -> str:
        """As it is written in a plan."""
        return f"{self.metric}:mean" if self.quantile is None else f"{self.metric}@p{self.quantile * 100:g}"
