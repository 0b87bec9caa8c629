"""The plan of an experiment that a client runs: what each arm asks of its requests, and of which server."""

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
    """As `SpeculationParams`; written as a mapping, or as its mode alone."""

    @model_validator(mode="before")
    @classmethod
    def _from_mode(cls, value: Any) -> Any:
        # YAML reads a bare off as false, and on as true.
        if isinstance(value, bool):
            return {"mode": "on" if value else "off"}
        return {"mode": value} if isinstance(value, str) else value

    @field_validator("drafters", check_fields=False)
    @classmethod
    def _names_any(cls, drafters: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if drafters == ():
            raise ValueError("names no drafter; leave it out for all of them, or turn speculation off")
        return drafters

    @property
    def params(self) -> SpeculationParams:
        """As the client has it."""
        return SpeculationParams(**self.model_dump())


def _with_params(base: type[StrictModel], record: Any) -> Any:
    """``base`` with the parameters of ``record`` as its fields."""
    hints = get_type_hints(record)
    fields: dict[str, Any] = {p.name: (Annotated[hints[p.name], _in_bounds(p)], p.default) for p in params_of(record)}
    return create_model("ArmSpeculation", __base__=base, **fields)


if TYPE_CHECKING:
    ArmSpeculation = _Speculation
else:
    ArmSpeculation = _with_params(_Speculation, SpeculationParams)
_OWN = {each.name: _in_bounds(each) for each in params_of(Request)}


class ArmRequest(StrictModel):
    """``prediction`` and ``session`` False: those that the prompts have are not sent. ``body``: further fields for
    servers with OpenAI's API; gRPC has none."""

    speculation: ArmSpeculation = ArmSpeculation()
    priority: Annotated[int, _OWN["priority"]] = 0
    target_tpot_ms: Annotated[float | None, _OWN["target_tpot_ms"]] = None
    prediction: bool = True
    session: bool = True
    body: dict[str, Any] = Field(default_factory=dict)

    @property
    def options(self) -> GenerateOptions:
        """For gRPC."""
        return GenerateOptions(
            speculation=self.speculation.params, priority=self.priority, target_tpot_ms=self.target_tpot_ms
        )

    @property
    def fields(self) -> dict[str, Any]:
        """For HTTP: what was written in the plan and nothing else, as other servers refuse fields of ours."""
        names = ("speculation", "priority", "target_tpot_ms")
        written = self.model_dump(mode="json", exclude_unset=True, include=set(names))
        return written | self.body

    def apply(self, ask: LoadRequest) -> LoadRequest:
        """The prompt as this arm sends it."""
        hidden: dict[str, Any] = {name: "" for name in ("prediction", "session") if not getattr(self, name)}
        return dataclasses.replace(ask, **hidden)


MODES = ("paired_replay", "aa", "switchback")


def read_plan(path: Path) -> ExperimentConfig:
    """The plan in a file, if a client can run it; its trace's path is one from here.

    Raises:
        ExperimentError: it cannot; names every field at fault, with its line.
    """
    text = read_text(path)
    config = parse_config(text, str(path))
    refuse(text, str(path), problems(config, path.parent))
    if config.load.trace is None:
        return config
    return config.model_copy(update={"load": config.load.model_copy(update={"trace": path.parent / config.load.trace})})


def problems(config: ExperimentConfig, folder: Path) -> Iterator[tuple[Place, str]]:
    """What is at fault in a plan that lies in ``folder``, and where it stands."""
    assignment = config.assignment
    if assignment.mode not in MODES or (assignment.mode == "aa" and assignment.unit is not None):
        what = f"{assignment.mode} with a unit" if assignment.mode in MODES else assignment.mode
        yield (
            ("assignment", "mode"),
            f"{what} is for live traffic, in a running server; here there are {', '.join(MODES)}",
        )
    for name, arm in config.arms.items():
        if arm.engine:
            yield (
                ("arms", name, "engine"),
                "settings of an engine switch in live experiments only; compare two servers, or set options in request",
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
        yield ("stopping",), "nothing says when it ends; give max_requests (of both arms together) or max_duration"
    if assignment.mode == "switchback" and stopping.rule == "always_valid":
        yield (
            ("stopping", "rule"),
            "a switchback has requests running at all times, and looking at its records would slow them; use fixed",
        )
    if assignment.mode == "switchback" and not config.load.open_loop:
        yield (
            ("load",),
            "a switchback needs requests that arrive whatever becomes of those before; give rate or trace",
        )


def _load_problems(load: Load, folder: Path) -> Iterator[tuple[Place, str]]:
    if load.workload is None and load.trace is None:
        yield ("load",), f"nothing says what is asked; give workload ({', '.join(SERVE_WORKLOADS)}) or trace"
    if load.workload is not None and load.workload not in SERVE_WORKLOADS:
        yield ("load", "workload"), f"no workload {load.workload!r}; there are {', '.join(SERVE_WORKLOADS)}"
    if load.trace is not None and not (folder / load.trace).is_file():
        yield ("load", "trace"), f"{folder / load.trace} is no file"


class ArmServer(NamedTuple):
    """``source``: what gave the URL, for errors. ``shown``: how reports call the server. model "": the first that the
    server names."""

    url: str
    source: str
    shown: str
    credentials: Credentials = Credentials()
    model: str = ""


_SERVER_FACTS = ("version", "target", "draft", "dtype", "kernels", "numeric_mode", "threads", "drafters", "max_batch")


@dataclass(frozen=True, slots=True)
class OpenArm:
    """``facts``: what its server says of itself."""

    name: str
    request: ArmRequest
    endpoint: Endpoint
    facts: dict[str, str]

    async def probe(self, ask: LoadRequest) -> bool:
        """Ask something short, to see whether the server takes this arm's requests. True: it tells token ids.

        Raises:
            ExperimentError: it does not take them.
        """
        seen = Record(ask.name, 0.0)
        try:
            await self.endpoint.send(self.request.apply(ask), seen)
        except RefusedError as error:
            raise ExperimentError(f"arm {self.name!r}: the server is too busy: {error}; try again later") from None
        except SpecdecError as error:
            raise ExperimentError(f"arms.{self.name}: the server does not take this arm's requests: {error}") from None
        return bool(seen.token_hash)


@contextlib.asynccontextmanager
async def open_arm(
    name: str, request: ArmRequest, url: str, credentials: Credentials, *, model: str, temperature: float, source: str
) -> AsyncIterator[OpenArm]:
    """The arm at ``url``, which ``source`` gave; its connections end with the context.

    Raises:
        ExperimentError: the server does not answer, or the URL means nothing; names the source.
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
