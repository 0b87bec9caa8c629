"""The plan of an experiment that a client runs: the options and the server of each arm."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

from pydantic import AfterValidator, Field, ValidationError, create_model, field_validator, model_validator

from bench.serve import SERVE_WORKLOADS
from bench.serve.endpoints import ServerUrl, connect_with
from server.experiment.config import ExperimentConfig, Load, Place, StrictModel, parse_config, read_text, refuse
from server.experiment.records import ExperimentError
from specdec.client.connection import Credentials
from specdec.client.prompt import GenerateOptions
from specdec.core.fields import Param, params_of
from specdec.core.types import Request, SpeculationParams
from specdec.errors import ConfigError, SpecdecError
from specdec.load.request import Endpoint, LoadRequest, Record, RefusedError


def _in_bounds(each: Param) -> AfterValidator:
    def check(value: Any) -> Any:
        problem = "" if value is None else each.kind.problem(value, 0)
        if problem:
            raise ValueError(problem)
        return value

    return AfterValidator(check)


class _Speculation(StrictModel):
    """`SpeculationParams`, written as a mapping, or as its mode alone."""

    @model_validator(mode="before")
    @classmethod
    def _from_mode(cls, value: Any) -> Any:
        # YAML reads an unquoted off as false, and on as true.
        if isinstance(value, bool):
            return {"mode": "on" if value else "off"}
        return {"mode": value} if isinstance(value, str) else value

    @field_validator("drafters", check_fields=False)
    @classmethod
    def _names_any(cls, drafters: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if drafters == ():
            raise ValueError("must not be empty; leave it out for all drafters, or turn speculation off")
        return drafters

    @property
    def params(self) -> SpeculationParams:
        return SpeculationParams(**self.model_dump())


def _with_params(base: type[StrictModel], record: Any) -> Any:
    """``base`` with the parameters of ``record`` as fields."""
    hints = get_type_hints(record)
    fields: dict[str, Any] = {p.name: (Annotated[hints[p.name], _in_bounds(p)], p.default) for p in params_of(record)}
    return create_model("ArmSpeculation", __base__=base, **fields)


if TYPE_CHECKING:
    ArmSpeculation = _Speculation
else:
    ArmSpeculation = _with_params(_Speculation, SpeculationParams)
_OWN = {each.name: _in_bounds(each) for each in params_of(Request)}


class ArmRequest(StrictModel):
    speculation: ArmSpeculation = ArmSpeculation()
    priority: Annotated[int, _OWN["priority"]] = 0
    target_tpot_ms: Annotated[float | None, _OWN["target_tpot_ms"]] = None
    prediction: bool = True  # False: remove the predictions of the prompts
    session: bool = True  # False: remove their sessions
    body: dict[str, Any] = Field(default_factory=dict)  # more fields for OpenAI endpoints

    @property
    def options(self) -> GenerateOptions:
        """For gRPC."""
        return GenerateOptions(
            speculation=self.speculation.params, priority=self.priority, target_tpot_ms=self.target_tpot_ms
        )

    @property
    def fields(self) -> dict[str, Any]:
        """For HTTP: only what the plan sets, because other servers reject unknown fields."""
        names = ("speculation", "priority", "target_tpot_ms")
        written = self.model_dump(mode="json", exclude_unset=True, include=set(names))
        return written | self.body

    def apply(self, ask: LoadRequest) -> LoadRequest:
        """The request with this arm's options."""
        hidden: dict[str, Any] = {name: "" for name in ("prediction", "session") if not getattr(self, name)}
        return dataclasses.replace(ask, **hidden)


MODES = ("paired_replay", "aa", "switchback")


def read_plan(path: Path) -> ExperimentConfig:
    """The plan in a file, checked for a client; its trace's path becomes relative to the working directory.

    Raises:
        ExperimentError: a client cannot run it; names every fault, with its line.
    """
    text = read_text(path)
    config = parse_config(text, str(path))
    refuse(text, str(path), problems(config, path.parent))
    if config.load.trace is None:
        return config
    return config.model_copy(update={"load": config.load.model_copy(update={"trace": path.parent / config.load.trace})})


def problems(config: ExperimentConfig, folder: Path) -> Iterator[tuple[Place, str]]:
    """The faults of a plan in ``folder``, and their places."""
    assignment = config.assignment
    if assignment.mode not in MODES or (assignment.mode == "aa" and assignment.unit is not None):
        what = f"{assignment.mode} with a unit" if assignment.mode in MODES else assignment.mode
        yield (
            ("assignment", "mode"),
            f"{what} is for live traffic in a running server; `specdec ab run` has {', '.join(MODES)}",
        )
    for name, arm in config.arms.items():
        if arm.engine:
            yield (
                ("arms", name, "engine"),
                "engine settings switch only in live experiments; compare two servers, or set options in request",
            )
        try:
            ArmRequest.model_validate(arm.request)
        except ValidationError as error:
            for found in error.errors():
                yield ("arms", name, "request", *found["loc"]), str(found["msg"])
        if arm.url is not None:
            try:
                ServerUrl.read(arm.url)
            except ConfigError as error:
                yield ("arms", name, "url"), str(error).removeprefix("url: ")
    yield from _load_problems(config.load, folder)
    stopping = config.stopping
    if config.load.trace is None and stopping.max_requests is None and stopping.max_duration is None:
        yield ("stopping",), "the run has no end; give max_requests (of both arms together) or max_duration"
    if assignment.mode == "switchback" and stopping.rule == "always_valid":
        yield (
            ("stopping", "rule"),
            "a switchback always has requests running, and analysing its records would slow them; use fixed",
        )
    if assignment.mode == "switchback" and not config.load.open_loop:
        yield (
            ("load",),
            "a switchback needs arrival times; give rate or trace",
        )


def _load_problems(load: Load, folder: Path) -> Iterator[tuple[Place, str]]:
    if load.workload is None and load.trace is None:
        yield ("load",), f"the load has no prompts; give workload ({', '.join(SERVE_WORKLOADS)}) or trace"
    if load.workload is not None and load.workload not in SERVE_WORKLOADS:
        yield ("load", "workload"), f"no workload {load.workload!r}; there are {', '.join(SERVE_WORKLOADS)}"
    if load.trace is not None and not (folder / load.trace).is_file():
        yield ("load", "trace"), f"{folder / load.trace} is not a file"


class ArmServer(NamedTuple):
    url: str
    source: str  # the option or field that gave the URL, for errors
    shown: str  # its name in reports
    credentials: Credentials = Credentials()
    model: str = ""  # empty: the first that the server lists


_SERVER_FACTS = ("version", "target", "draft", "dtype", "kernels", "numeric_mode", "threads", "drafters", "max_batch")


@dataclass(frozen=True, slots=True)
class OpenArm:
    name: str
    request: ArmRequest
    endpoint: Endpoint
    facts: dict[str, str]  # the server's description

    async def probe(self, ask: LoadRequest) -> bool:
        """Send a short request, to test that the server accepts this arm's requests. True: it returns token ids.

        Raises:
            ExperimentError: the server rejects them.
        """
        seen = Record(ask.name, 0.0)
        try:
            await self.endpoint.send(self.request.apply(ask), seen)
        except RefusedError as error:
            raise ExperimentError(f"arm {self.name!r}: the server is busy: {error}; retry later") from None
        except SpecdecError as error:
            raise ExperimentError(f"arms.{self.name}: the server rejects this arm's requests: {error}") from None
        return bool(seen.token_hash)


@contextlib.asynccontextmanager
async def open_arm(
    name: str, request: ArmRequest, url: str, credentials: Credentials, *, model: str, temperature: float, source: str
) -> AsyncIterator[OpenArm]:
    """The arm at ``url``, which ``source`` gave; its connections close with the context.

    Raises:
        ExperimentError: the server does not answer, or the URL is invalid; names the source.
    """
    try:
        endpoint, found = await connect_with(
            url, credentials, request.options, request.fields, model=model, temperature=temperature, tell_ids=True
        )
    except SpecdecError as error:
        raise ExperimentError(f"{source} (arm {name!r}): {url}: {str(error).removeprefix('url: ')}") from None
    try:
        server = found.pop("server", {})
        facts = {key: str(value) for key, value in found.items()}
        facts |= {key: _words(server[key]) for key in _SERVER_FACTS if server.get(key) is not None}
        yield OpenArm(name, request, endpoint, facts)
    finally:
        await endpoint.close()


def _words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
