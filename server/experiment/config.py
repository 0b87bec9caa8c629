"""The plan of an experiment, read from a YAML file: arms, assignment, load, metrics, guardrails, stopping."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from server.experiment.records import METRICS, PlanError
from specdec.config import load_yaml, reason_of
from specdec.core.fields import UINT32


class StrictModel(BaseModel):
    """Immutable; unknown fields are rejected, and so are infinite numbers and NaN, which JSON cannot hold."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _as_share(value: Any) -> Any:
    if isinstance(value, str) and value.rstrip().endswith("%"):
        try:
            return float(value.rstrip()[:-1]) / 100
        except ValueError:
            raise ValueError(f"{value!r} is not a percentage; write 2% or 0.02") from None
    return value


def _as_seconds(value: Any) -> Any:
    units = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    if isinstance(value, str):
        number = value.rstrip("smh")
        try:
            return float(number) * units[value[len(number) :] or "s"]
        except (ValueError, KeyError):
            raise ValueError(f"{value!r} is not a duration; write 500ms, 20s, 5m, 2h or a number of seconds") from None
    return value


Share = Annotated[float, BeforeValidator(_as_share)]
"""A share of 1; `2%` is 0.02."""

Seconds = Annotated[float, BeforeValidator(_as_seconds)]
"""A duration in seconds, or with a unit: `2h`, `5m`, `20s`, `500ms`."""


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""The name of an experiment, and of an arm in a running server."""


class Arm(StrictModel):
    """One arm. The runner of the experiment checks what ``request`` and ``engine`` may contain."""

    weight: float = Field(1.0, gt=0, le=10**9, description="share of the requests, relative to the other arms'")
    request: dict[str, Any] = Field(default_factory=dict, description="options of single requests")
    engine: dict[str, Any] = Field(default_factory=dict, description="settings that can switch between blocks")
    url: str | None = Field(None, description="another server, for a comparison of two")

    @field_validator("request")
    @classmethod
    def _mode_is_a_word(cls, request: dict[str, Any]) -> dict[str, Any]:
        return request | {"speculation": _word(request["speculation"])} if "speculation" in request else request


def _word(mode: Any) -> Any:
    """YAML reads an unquoted `off` as false. mode: of speculation, or a mapping with it."""
    if isinstance(mode, dict):
        return mode | {"mode": _word(mode["mode"])} if "mode" in mode else mode
    return ("on" if mode else "off") if isinstance(mode, bool) else mode


Mode = Literal["paired_replay", "switchback", "hash", "aa"]
Unit = Literal["request", "session", "user", "prompt"]


class Assignment(StrictModel):
    """``paired_replay`` serves the same request in both arms; ``switchback`` changes the arm of all
    requests from block to block; ``hash`` gives every key its arm; ``aa`` replays pairs in two equal arms, or, with
    a ``unit``, gives every key one of two equal arms."""

    mode: Mode = "paired_replay"
    block_s: Seconds = Field(20.0, ge=0.001)
    washout_s: Seconds = Field(2.0, ge=0)
    salt: str = Field("", description="empty: the name of the experiment")
    unit: Unit | None = Field(None, description="what an arm is assigned to in a running server; null: request")
    share: Share = Field(1.0, gt=0, le=1, description="part of the keys, or of the requests, that take part")
    allow_override: bool = False
    expect_same_tokens: bool = Field(True, description="pairs with different tokens make the result invalid")

    @model_validator(mode="after")
    def _washout_fits(self) -> Assignment:
        if self.mode == "switchback" and self.washout_s >= self.block_s:
            raise ValueError("washout_s must be shorter than block_s")
        return self

    @property
    def pairs(self) -> bool:
        """Whether each request is served in both arms."""
        return self.mode == "paired_replay" or (self.mode == "aa" and self.unit is None)


OPEN_TURN = 32  # requests of a turn in an open loop


class Load(StrictModel):
    """For `specdec ab run`; an experiment on live traffic ignores it.

    Prompts come from a ``workload``, or from a ``trace`` (a file beside the plan), which has its own arrival times.
    Without a trace, requests arrive at a ``rate``, or ``concurrency`` of them run at any time.
    """

    workload: str | None = None
    trace: Path | None = None
    speed: float = Field(1.0, gt=0, description="of a trace: 2 replays it in half the time")
    rate: float | None = Field(None, gt=0, description="requests per second; null: a closed loop")
    arrivals: Literal["constant", "poisson", "gamma"] = "poisson"
    shape: float = Field(0.5, ge=0.001, description="of gamma arrivals; below 1 they come in bursts")
    concurrency: int = Field(1, ge=1, description="of a closed loop")
    max_tokens: int | None = Field(None, ge=1, le=UINT32, description="longest answer; null: the workload's own limit")
    fixed_length: bool = Field(False, description="every answer has the maximum length")
    temperature: float = Field(0.0, ge=0)
    seed: int = Field(0, ge=0, description="of arrivals and of the requests' own seeds")
    cache: Literal["cold", "warm"] = Field(
        "cold", description="cold: no two requests share cached prefixes or draft texts; warm: those of one arm do"
    )
    timeout_s: Seconds = Field(120.0, gt=0)

    @model_validator(mode="after")
    def _one_source(self) -> Load:
        if self.workload is not None and self.trace is not None:
            raise ValueError("workload and trace both give the prompts; give one of them")
        if self.rate is not None and self.trace is not None:
            raise ValueError("rate and trace both give arrival times; leave rate out")
        if self.concurrency > 1 and (self.rate is not None or self.trace is not None):
            raise ValueError("concurrency is for a closed loop; leave it out if arrival times are given")
        return self

    @property
    def open_loop(self) -> bool:
        return self.rate is not None or self.trace is not None

    @property
    def turn(self) -> int:
        """Requests that an arm gets before the other arm gets the same."""
        return OPEN_TURN if self.open_loop else self.concurrency


class MetricTarget(StrictModel):
    """Written `ttft_ms@p95`, `tokens_per_step:mean`, or a mapping whose `metric` is written so. Without a quantile: the
    mean."""

    metric: str
    quantile: float | None = Field(None, gt=0, lt=1)
    min_effect: Share = Field(0.02, ge=0, lt=1, description="smaller relative changes do not matter")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        found = {"metric": value} if isinstance(value, str) else value
        if not isinstance(found, dict) or not isinstance(found.get("metric"), str) or "quantile" in found:
            return found
        name, at, quantile = found["metric"].partition("@p")
        if not at:
            return found | {"metric": name.removesuffix(":mean")}
        try:
            # Rounded: p99.9 must be 0.999, not 0.9990000000000001.
            return found | {"metric": name, "quantile": round(float(quantile) / 100, 9)}
        except ValueError:
            raise ValueError(f"{found['metric']!r}: write METRIC@pNN, as in ttft_ms@p95, or METRIC:mean") from None

    @model_validator(mode="after")
    def _is_known(self) -> MetricTarget:
        if self.metric not in METRICS:
            raise ValueError(f"no metric {self.metric!r}; there are {', '.join(METRICS)}")
        return self

    @property
    def label(self) -> str:
        """The notation of plans."""
        return f"{self.metric}:mean" if self.quantile is None else f"{self.metric}@p{self.quantile * 100:g}"


ERROR_RATE = "error_rate"


class Guardrail(StrictModel):
    """``metric`` is `error_rate` (its limit is an absolute increase) or a target such as `queue_ms@p99` (its limit is
    relative). Equality of tokens is not a guardrail: see `Assignment.expect_same_tokens`."""

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
        """The metric to compare; None for the error rate."""
        return None if self.metric == ERROR_RATE else MetricTarget.model_validate(self.metric)


QUEUE = Guardrail(metric="queue_ms@p95", max_increase=0.10)


class Stopping(StrictModel):
    """``fixed``: conclude once, at the planned number. ``always_valid``: conclude at any time, with wider intervals."""

    rule: Literal["fixed", "always_valid"] = "fixed"
    alpha: float = Field(0.05, gt=0, lt=0.5)
    max_requests: int | None = Field(None, ge=1)
    max_duration: Seconds | None = Field(None, gt=0)
    min_units: int = Field(8, ge=8, description="pairs, blocks or keys before a conclusion")
    expected_units: int = Field(1000, ge=1, le=10**9, description="always_valid is tightest about here")
    max_slip_ms: float = Field(5.0, gt=0, description="the load generator's p99 lag above which a run is invalid")


class ExperimentConfig(StrictModel):
    """The first arm is the control."""

    name: str = Field(pattern=f"^{NAME.pattern}$")
    arms: dict[str, Arm] = Field(min_length=2, max_length=2)
    assignment: Assignment = Assignment()
    primary: MetricTarget = MetricTarget(metric="e2e_ms", quantile=0.5)
    secondary: tuple[MetricTarget, ...] = ()
    guardrails: tuple[Guardrail, ...] = (
        Guardrail(metric="error_rate", max_increase=0.01),
        QUEUE,
    )
    stopping: Stopping = Stopping()
    load: Load = Load()
    warmup_requests: int = Field(0, ge=0, description="first requests of each arm that are not analysed")

    @field_validator("arms", mode="before")
    @classmethod
    def _names_are_text(cls, arms: Any) -> Any:
        if isinstance(arms, dict) and not all(isinstance(name, str) for name in arms):
            raise ValueError(
                "YAML reads off, on, no and yes as false and true, and digits as a number; put the arm's name in quotes"
            )
        return arms

    @model_validator(mode="after")
    def _arms_fit_the_mode(self) -> ExperimentConfig:
        first, second = self.arms.values()
        if self.assignment.mode == "aa" and not self.arms_are_equal:
            raise ValueError("arms: mode aa compares an arm with itself; give both the same options")
        if self.assignment.pairs and first.weight != second.weight:
            raise ValueError(f"arms: {self.assignment.mode} serves each request in both arms; leave weight out")
        return self

    @property
    def arms_are_equal(self) -> bool:
        """Whether the arms differ in their weights at most."""
        first, second = self.arms.values()
        return first.model_copy(update={"weight": second.weight}) == second

    @property
    def checked_guardrails(self) -> tuple[Guardrail, ...]:
        """``guardrails`` without `QUEUE` where an arm speaks HTTP, whose answers do not have that time."""
        if not any((arm.url or "").lower().startswith("http") for arm in self.arms.values()):
            return self.guardrails
        return tuple(guardrail for guardrail in self.guardrails if guardrail != QUEUE)


Place = tuple[int | str, ...]
"""A place in a plan: keys, outermost first."""

Problem = tuple[Place, str]


def parse_config(text: str, source: str) -> ExperimentConfig:
    """The experiment that a YAML or JSON text describes. source: its name in errors.

    Raises:
        PlanError: a field is unknown, missing or out of range; names each, with its line.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also impossible dates, and unbounded nesting
        raise PlanError(source, [f"not valid YAML: {error}"]) from None
    if not isinstance(root, yaml.MappingNode):
        raise PlanError(source, ["must be a mapping with `name:` and `arms:`"])
    try:
        config = ExperimentConfig.model_validate(data)
    except ValidationError as error:
        raise PlanError(
            source, [_with_line(root, e["loc"], reason_of(e, ExperimentConfig)) for e in error.errors()]
        ) from None
    # Not in the model, so that manifests of earlier versions can be read.
    found = [_with_line(root, place, problem) for place, problem in _without_effect(config)]
    if found:
        raise PlanError(source, found)
    return config


def _without_effect(config: ExperimentConfig) -> Iterator[Problem]:
    """The fields that the plan's mode does not use."""
    assignment = config.assignment
    if assignment.mode in ("switchback", "paired_replay"):
        for name in ("unit", "share"):
            if getattr(assignment, name) != type(assignment).model_fields[name].default:
                yield ("assignment", name), f"has no effect in mode {assignment.mode}; hash and aa use it"
    if assignment.mode == "switchback" and len({arm.weight for arm in config.arms.values()}) > 1:
        yield ("arms",), "switchback gives both arms equal time; leave weight out, which hash and aa use"


def refuse(text: str, source: str, problems: Iterable[Problem]) -> None:
    """Reject a text that `parse_config` accepted, for problems at places in it, each reported with its line.

    Raises:
        PlanError: there are any.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert root is not None  # `parse_config` accepted it
    found = [_with_line(root, place, problem) for place, problem in problems]
    if found:
        raise PlanError(source, found)


def _with_line(root: yaml.Node, place: Place, problem: str) -> str:
    where = ".".join(map(str, place))
    return f"line {_line(root, place)}: {where + ': ' if where else ''}{problem}"


def _line(node: yaml.Node, place: Place) -> int:
    """The line (from 1) of the deepest part of ``place`` that is in the file."""
    line = node.start_mark.line + 1
    for part in place:
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == str(part)]
            if not found:
                break
            key, node = found[0]
            line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line
