"""What must not get worse, whatever the primary metric does."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from server.experiment.config.metric_target import MetricTarget
from server.experiment.config.strict_model import Share, StrictModel

ERROR_RATE = "error_rate"


class Guardrail(StrictModel):
    """``metric`` is `error_rate` (its limit is an increase of the share itself) or a target such as `queue_ms@p99` (its
    limit is relative). Equality of tokens is no choice here: see `Assignment.expect_same_tokens`."""

    metric: str
    max_increase: Share = Field(ge=0)

    @field_validator("metric")
    @classmethod
    def _is_known(cls, metric: str) -> str:
        if metric != ERROR_RATE:
            MetricTarget.model_validate(metric)
        return metric

    @model_validator(mode="after")
    def _errors_are_shares(self) -> Guardrail:
        if self.metric == ERROR_RATE and self.max_increase > 1:
            raise ValueError("max_increase of error_rate is a share of all requests, at most 1 (100%)")
        return self

    @property
    def target(self) -> MetricTarget | None:
        """The metric that is compared; None for the error rate."""
        return None if self.metric == ERROR_RATE else MetricTarget.model_validate(self.metric)
