"""The plan of an experiment that a client runs: the options and the server of each arm, and its requests.

Requests, their times and their order are a function of the plan alone, so that a killed run can resume.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import AsyncIterator, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.serve import SERVE_WORKLOADS
from bench.serve.endpoints import ServerUrl, connect
from bench.serve.schedule import endless_requests, read_trace
from server.experiment.arm_options import UNTOUCHED, ArmOptions, read_options
from server.experiment.assignment import digest
from server.experiment.config import ExperimentConfig, Load, Problem, parse_config, refuse
from server.experiment.records import ExperimentError
from specdec.client.connection import Credentials
from specdec.client.prompt import GenerateOptions
from specdec.config import read_text
from specdec.errors import ConfigError, SpecdecError
from specdec.load.arrivals import shape_of, unit_arrivals
from specdec.load.request import Endpoint, LoadRequest, Record, RefusedError, TimedRequest

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
    try:
        json.dumps(own["body"], allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        found.append((("body",), f"cannot be sent as JSON ({error})"))
    rest = {name: value for name, value in given.items() if name not in ("prediction", "session", "body")}
    changes, problems = read_options(rest, _OPTIONS)
    return ArmRequest(changes, own["prediction"], own["session"], own["body"]), [*found, *problems]


MODES = ("paired_replay", "aa")


def read_plan(path: Path) -> ExperimentConfig:
    """The plan in a file, checked for a client; its trace's path becomes relative to the working directory.

    Raises:
        ConfigError: the file cannot be read.
        ExperimentError: a client cannot run it; names every fault, with its line.
    """
    text = read_text(path, f"{path}:")
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
            f"{what} is for the traffic of a running server: start it with `specdec ab start PLAN`; without traffic, "
            "add a load with `specdec bench serve --rate`. `specdec ab run` has paired_replay (also with a `rate`) and "
            "aa",
        )
        return  # of the rest, such as a load, each kind of plan needs something else
    if assignment.mode == "aa" and assignment.share != 1:
        yield ("assignment", "share"), "has no effect here, where every prompt takes part; live experiments use it"
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


def _load_problems(load: Load, folder: Path) -> Iterator[Problem]:
    if load.workload is None and load.trace is None:
        yield ("load",), f"the load has no prompts; give workload ({', '.join(SERVE_WORKLOADS)}) or trace"
    if load.workload is not None and load.workload not in SERVE_WORKLOADS:
        yield ("load", "workload"), f"no workload {load.workload!r}; there are {', '.join(SERVE_WORKLOADS)}"
    if load.trace is not None and not (folder / load.trace).is_file():
        yield ("load", "trace"), f"{folder / load.trace} is not a file; of captures, `cat FOLDER/*.jsonl` makes one"
    if load.trace is not None:
        for name in ("max_tokens", "fixed_length"):
            if getattr(load, name):
                yield ("load", name), "has no effect on a trace; set `max_tokens` and `fixed` in its lines"


class ArmServer(NamedTuple):
    url: str
    source: str  # the option or field that gave the URL, for errors
    shown: str  # its name in reports
    credentials: Credentials = Credentials()
    model: str = ""  # empty: the first that the server lists
    key_option: str = "--key-file"  # that gives the key, for errors


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
        return seen.token_ids is not None


@contextlib.asynccontextmanager
async def open_arm(name: str, request: ArmRequest, side: ArmServer, temperature: float) -> AsyncIterator[OpenArm]:
    """The arm at its server; its connections close with the context.

    Raises:
        ExperimentError: the server does not answer, or the URL is invalid; names the source.
    """
    try:
        if request.body and ServerUrl.read(side.url).protocol == "grpc":
            raise ConfigError("the arm's `body` is for http:// URLs; leave it out, or give one")
        endpoint, found = await connect(
            side.url, side.credentials, request.options, request.fields, model=side.model, temperature=temperature,
            with_ids=True,
        )  # fmt: skip
    except SpecdecError as error:
        reason = str(error).removeprefix("url: ").replace("--key-file", side.key_option)
        raise ExperimentError(f"{side.source} (arm {name!r}): {side.url}: {reason}") from None
    try:
        server = found.pop("server", {})
        facts = {key: str(value) for key, value in found.items()}
        known = {key: value for key in _SERVER_FACTS if (value := server.get(key)) is not None}
        facts |= {key: ", ".join(value) if isinstance(value, tuple) else str(value) for key, value in known.items()}
        yield OpenArm(name, request, endpoint, facts)
    finally:
        await endpoint.close()


class Batch(NamedTuple):
    first: int  # the arm (0 or 1) that gets them first
    asks: Sequence[TimedRequest]  # from the beginning of its turn; each one's name is that of its pair


def arrival_times(load: Load) -> Iterator[float]:
    """Seconds after the beginning, ascending, deterministic for a load; all 0 in a closed loop."""
    rate = load.rate
    if rate is None:
        return itertools.repeat(0.0)
    return (unit / rate for unit in unit_arrivals(shape_of(load.arrivals, load.shape), load.seed))


_SEEDS = 1 << 31  # number of seeds
_WARM_UP = "w"


class Script:
    """attempt: number of earlier runs. A resumed run names its pairs differently, because an earlier try may have left
    a record.

    **Order.** An arm gets a turn of few requests, then the other arm gets the same, with the same seeds and gaps. Which
    arm is first is random for every second turn; the next turn has the opposite order (ABBA or BAAB), so a machine that
    slows down over time slows both arms alike.

    **Caches.** The second arm must not find what the first one cached: the prompt's keys and values, or the answer as a
    draft. So every request has a cache salt that differs between the arms: with ``cache: cold`` one of its own, so that
    both find an empty cache; with ``cache: warm`` one per arm, so that both have served exactly the same requests
    before. A resumed run uses new salts, because only the last arm's requests would be cached. Servers without salts do
    not get them. Two such servers are equally warm, since each gets everything once. On a single one, the second arm
    finds the prompt in the cache; the order makes this equally frequent in both arms, and their cached tokens show it.

    Raises:
        ConfigError: the trace cannot be read.
        WorkloadUnavailableError: the workload's prompts are not installed.
    """

    def __init__(self, config: ExperimentConfig, attempt: int) -> None:
        self._config, self._load = config, config.load
        self._salt = config.assignment.salt or config.name
        self._tag = f".{attempt}" if attempt else ""
        self._trace = None if config.load.trace is None else read_trace(config.load.trace, config.load.speed)
        next(self._prompts())

    @property
    def planned(self) -> int | None:
        """Requests per arm; None if only time limits the run."""
        limits = [len(self._trace)] if self._trace is not None else []
        if self._config.stopping.max_requests is not None:
            limits.append(max(1, self._config.stopping.max_requests // 2))
        return min(limits, default=None)

    def warm_up(self) -> Iterator[Batch]:
        """The requests before measurement; a short trace is repeated."""
        asks = itertools.islice(itertools.cycle(self._prompts()), self._config.warmup_requests)
        for number, ask in enumerate(asks):
            yield Batch(self.first(number), [self.paired(f"{_WARM_UP}{number:06}", 0.0, ask)])

    def probe(self) -> LoadRequest:
        return dataclasses.replace(self.paired("probe", 0.0, next(self._prompts())).ask, max_tokens=1)

    def turns(self, done: Container[int]) -> Iterator[Batch]:
        """All measured requests, except those whose numbers are ``done``."""
        numbered = enumerate(itertools.islice(self.schedule(), self.planned))
        for turn in itertools.count():
            chosen = list(itertools.islice(numbered, self._load.turn))
            if not chosen:
                return
            start = chosen[0][1].offset_s
            left = [self.paired(f"{n:06}", at - start, ask) for n, (at, ask) in chosen if n not in done]
            if left:
                yield Batch(self.first(turn), left)

    def schedule(self) -> Iterator[TimedRequest]:
        """The requests of one arm with their arrival times, 0 in a closed loop; without end unless there is a trace."""
        if self._trace is not None:
            return iter(self._trace)
        asks = itertools.islice(self._prompts(), self._config.warmup_requests, None)
        return map(TimedRequest, arrival_times(self._load), asks)

    def first(self, turn: int) -> int:
        """The arm that is first in a turn: random in an even one, the opposite in the next."""
        return (digest(self._salt, f"order/{turn // 2}")[0] & 1) ^ (turn & 1)

    def in_arm(self, arm: int, ask: LoadRequest) -> LoadRequest:
        """The request of a pair as sent to an arm: with a salt that only this arm uses."""
        whose = ask.name if self._load.cache == "cold" else self._tag
        return dataclasses.replace(ask, salt=digest(self._salt, f"cache/{arm}/{whose}/{ask.salt}").hex())

    @staticmethod
    def number(pair: str) -> int | None:
        """The number in a pair's name; None for warm-up."""
        return None if pair.startswith(_WARM_UP) else int(pair.partition(".")[0])

    @staticmethod
    def attempt(pair: str) -> str:
        """The attempt in a pair's name; empty for the first."""
        return pair.partition(".")[2]

    def _prompts(self) -> Iterator[LoadRequest]:
        load = self._load
        if self._trace is not None:
            return (timed.ask for timed in self._trace)
        assert load.workload is not None  # checked by `read_plan`
        asks = endless_requests(load.workload, load.max_tokens)
        return (ask.of_fixed_length() for ask in asks) if load.fixed_length else asks

    def paired(self, name: str, offset_s: float, ask: LoadRequest) -> TimedRequest:
        """The request with a seed, under a name that includes the attempt."""
        seed = ask.seed
        if seed is None:
            seed = int.from_bytes(digest(self._salt, f"seed/{self._load.seed}/{name}")) % _SEEDS
        return TimedRequest(offset_s, dataclasses.replace(ask, name=name + self._tag, seed=seed))
