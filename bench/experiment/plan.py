"""The plan of an experiment that a client runs: the options and the server of each arm."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.serve import SERVE_WORKLOADS
from bench.serve.endpoints import ServerUrl, connect_with
from server.experiment.arm_options import UNTOUCHED, ArmOptions, read_options
from server.experiment.config import ExperimentConfig, Load, Problem, parse_config, read_text, refuse
from server.experiment.records import ExperimentError
from specdec.client.connection import Credentials
from specdec.client.prompt import GenerateOptions
from specdec.errors import ConfigError, SpecdecError
from specdec.load.request import Endpoint, LoadRequest, Record, RefusedError

_OPTIONS = ("priority", "target_tpot_ms")


@dataclass(frozen=True)
class ArmRequest:
    changes: ArmOptions
    prediction: bool = True  # False: remove the predictions of the prompts
    session: bool = True  # False: remove their sessions
    body: Mapping[str, Any] = field(default_factory=dict)  # more fields for OpenAI endpoints

    @property
    def options(self) -> GenerateOptions:
        """For gRPC."""
        request = self.changes.put(UNTOUCHED)
        return GenerateOptions(
            speculation=request.speculation, priority=request.priority, target_tpot_ms=request.target_tpot_ms
        )

    @property
    def fields(self) -> dict[str, Any]:
        """For HTTP: only what the plan sets, because other servers reject unknown fields."""
        speculation = {name: list(v) if isinstance(v, tuple) else v for name, v in self.changes.speculation.items()}
        return ({"speculation": speculation} if speculation else {}) | {**self.changes.plain, **self.body}

    def apply(self, ask: LoadRequest) -> LoadRequest:
        """The request with this arm's options."""
        hidden: dict[str, Any] = {name: "" for name in ("prediction", "session") if not getattr(self, name)}
        return dataclasses.replace(ask, **hidden)


def read_arm(given: Mapping[str, Any]) -> tuple[ArmRequest, list[Problem]]:
    """An arm's ``request`` mapping as options, and its problems."""
    own: dict[str, Any] = {"prediction": True, "session": True, "body": {}, **given}
    flags = ("prediction", "session")
    found: list[Problem] = [((name,), "must be true or false") for name in flags if not isinstance(own[name], bool)]
    if not isinstance(own["body"], dict):
        found.append((("body",), "must be a mapping"))
    rest = {name: value for name, value in given.items() if name not in ("prediction", "session", "body")}
    changes, problems = read_options(rest, _OPTIONS)
    return ArmRequest(changes, own["prediction"], own["session"], own["body"]), [*found, *problems]


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


def problems(config: ExperimentConfig, folder: Path) -> Iterator[Problem]:
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
        for place, problem in read_arm(arm.request)[1]:
            yield ("arms", name, "request", *place), problem
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


def _load_problems(load: Load, folder: Path) -> Iterator[Problem]:
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
            url, credentials, request.options, request.fields, model=model, temperature=temperature, with_ids=True
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
