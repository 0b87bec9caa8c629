"""Reads the plan of an experiment that a client is to run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from bench.experiment.arm_request import ArmRequest
from bench.serve import SERVE_WORKLOADS
from bench.serve.server_url import ServerUrl
from server.experiment.config.experiment_config import ExperimentConfig
from server.experiment.config.load import Load
from server.experiment.config.read_config import Place, parse_config, read_text, refuse
from specdec.errors import ConfigError

MODES = ("paired_replay", "aa", "switchback")


def read_plan(path: Path) -> ExperimentConfig:
    """The plan in a file, if a client can run it; its trace's path is one from here.

    Raises:
        ExperimentError: it can not; names every field at fault, with its line.
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
