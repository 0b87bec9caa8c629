"""A whole experiment as its file describes it."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from server.experiment.config.arm import Arm
from server.experiment.config.assignment import Assignment
from server.experiment.config.guardrail import Guardrail
from server.experiment.config.load import Load
from server.experiment.config.metric_target import MetricTarget
from server.experiment.config.stopping import Stopping
from server.experiment.config.strict_model import StrictModel


class ExperimentConfig(StrictModel):
    """The first arm is the control, that the other one is compared with."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    arms: dict[str, Arm] = Field(min_length=2, max_length=2)
    assignment: Assignment = Assignment()
    primary: MetricTarget = MetricTarget(metric="e2e_ms", quantile=0.5)
    secondary: tuple[MetricTarget, ...] = ()
    guardrails: tuple[Guardrail, ...] = (
        Guardrail(metric="error_rate", max_increase=0.01),
        Guardrail(metric="queue_ms@p99", max_increase=0.10),
    )
    stopping: Stopping = Stopping()
    load: Load = Load()
    warmup_requests: int = Field(0, ge=0, description="first requests of each arm that are not analysed")
    covariate: str | None = Field("prompt_tokens", description="CUPED of means uses it; null: none")
    store_prompts: bool = False

    @field_validator("arms", mode="before")
    @classmethod
    def _names_are_text(cls, arms: Any) -> Any:
        if isinstance(arms, dict) and any(isinstance(name, bool) for name in arms):
            raise ValueError('YAML reads off, on, no and yes as false and true; put the arm\'s name in quotes: "off"')
        return arms

    @field_validator("covariate")
    @classmethod
    def _covariate_is_known(cls, name: str | None) -> str | None:
        if name not in (None, "prompt_tokens"):
            raise ValueError("covariate must be known before the arm acts: prompt_tokens, or null")
        return name

    @model_validator(mode="after")
    def _arms_fit_the_mode(self) -> ExperimentConfig:
        first, second = self.arms.values()
        if self.assignment.mode == "aa" and (first.request, first.engine, first.url) != (
            second.request,
            second.engine,
            second.url,
        ):
            raise ValueError("arms: mode aa compares an arm with itself; give both the same options")
        if self.assignment.pairs and first.weight != second.weight:
            raise ValueError(f"arms: {self.assignment.mode} serves each request in both arms; leave weight out")
        return self

    @property
    def control(self) -> str:
        return next(iter(self.arms))

    @property
    def treatment(self) -> str:
        return list(self.arms)[1]
