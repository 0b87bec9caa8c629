"""Runs plans against fake arms on a virtual clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.experiment.plan import OpenArm, read_arm
from bench.experiment.run_folder import open_run
from bench.experiment.session import PairedRun
from server.experiment.analysis.analyse import analyse
from server.experiment.analysis.result import Result
from server.experiment.config import ExperimentConfig
from server.experiment.folder import ExperimentFolder, Manifest
from server.experiment.records import RecordLog, read_records
from specdec.load.request import Endpoint
from tests.bench.virtual_loop import run_virtually

STARTED = "2026-11-21T12:00:00.000+00:00"


def plan(**fields: Any) -> ExperimentConfig:
    """A plan of 20 pairs of chat prompts in a closed loop; ``fields`` replace fields of the plan."""
    default: dict[str, Any] = {
        "name": "off-or-auto",
        "arms": {"off": {"request": {"speculation": "off"}}, "auto": {}},
        "load": {"workload": "chat"},
        "stopping": {"max_requests": 40},
    }
    if fields.get("assignment", {}).get("mode") == "aa":
        default["arms"] = {"a": {}, "b": {}}
    return ExperimentConfig.model_validate(default | fields)


def play(
    folder: Path, config: ExperimentConfig, a: Endpoint, b: Endpoint, *, by_ids: bool = True, shown: Any = None
) -> str:
    """Run a plan and return why it ended. shown: receives every progress."""
    watch = (lambda progress: None) if shown is None else shown.append

    async def run() -> str:
        with open_run(folder, Manifest(config=config, started=STARTED, facts={"server": "fake"})) as found:
            (name_a, arm_a), (name_b, arm_b) = config.arms.items()
            arms = (
                OpenArm(name_a, read_arm(arm_a.request)[0], a, {}),
                OpenArm(name_b, read_arm(arm_b.request)[0], b, {}),
            )
            return await PairedRun(found, arms, by_ids, watch).run()

    why: str = run_virtually(run())
    return why


def logged(folder: Path) -> RecordLog:
    """The records of a run."""
    return read_records(folder)


def result(folder: Path) -> Result:
    """The result of a run."""
    return analyse(ExperimentFolder(folder).manifest(), read_records(folder))
