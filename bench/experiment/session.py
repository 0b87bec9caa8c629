"""A whole run of an experiment: from its plan to records."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from hashlib import blake2b
from pathlib import Path

from bench.engine_machine import commit, cpu_model
from bench.experiment.arm_request import ArmRequest
from bench.experiment.board import Board
from bench.experiment.open_arm import OpenArm, open_arm
from bench.experiment.paired_run import PairedRun
from bench.experiment.run_folder import open_run
from bench.experiment.script import Script
from bench.experiment.side import Side
from bench.experiment.switchback_run import SwitchbackRun
from server.experiment.config.experiment_config import ExperimentConfig
from server.experiment.manifest import Manifest

_HASH_BYTES = 8


async def run_experiment(
    config: ExperimentConfig, sides: tuple[Side, Side], out: Path, watch: Callable[[Board], None]
) -> str:
    """Ask both arms and record into ``out``, or go on with a run that lies there; says why it ended. ``watch`` is shown
    where the run is, now and then.

    Raises:
        ExperimentError: a server does not answer or does not take an arm's requests; the folder can not be used.
        WorkloadUnavailableError: the prompts are not installed.
        ConfigError: the trace can not be read.
    """
    probe = Script(config, 0).probe()
    async with AsyncExitStack() as stack:
        arms = [
            await stack.enter_async_context(
                open_arm(
                    name, ArmRequest.model_validate(arm.request), side.url, side.credentials, model=side.model,
                    temperature=config.load.temperature, source=side.source,
                )
            )
            for (name, arm), side in zip(config.arms.items(), sides, strict=True)
        ]  # fmt: skip
        both = (arms[0], arms[1])
        told = [await arm.probe(probe) for arm in both]
        by_ids = all(told)
        facts = machine_facts() | load_facts(config) | _server_facts(both, sides)
        facts["outputs compared by"] = "token ids" if by_ids else "text"
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        with open_run(out, Manifest(config=config, started=started, facts=facts)) as folder:
            kind = SwitchbackRun if config.assignment.mode == "switchback" else PairedRun
            return await kind(folder, both, by_ids, watch).run()


def machine_facts() -> dict[str, str]:
    """Where the requests come from, and the code's commit."""
    return {"cpu": cpu_model(), "cores": str(len(os.sched_getaffinity(0))), "commit": commit() or "unknown"}


def load_facts(config: ExperimentConfig) -> dict[str, str]:
    """What is asked, in words."""
    load = config.load
    facts: dict[str, str] = {"caches": load.cache}
    if load.trace is not None:
        # The file may change between a kill and the run that goes on.
        digest = blake2b(load.trace.read_bytes(), digest_size=_HASH_BYTES).hexdigest()
        return facts | {"load": f"replay of {load.trace.name} ({digest}) at {load.speed:g} x"}
    facts["prompts"] = str(load.workload)
    if load.rate is None:
        return facts | {"load": f"closed loop, {load.concurrency} at once"}
    return facts | {"load": f"open loop, {load.arrivals}, {load.rate:g} requests/s"}


def _server_facts(arms: tuple[OpenArm, OpenArm], sides: tuple[Side, Side]) -> dict[str, str]:
    """What servers say of themselves: once where both say the same."""
    each = [arm.facts | {"server": side.shown} for arm, side in zip(arms, sides, strict=True)]
    first, second = each
    facts = {name: value for name, value in first.items() if second.get(name) == value}
    for arm, found in zip(arms, each, strict=True):
        facts |= {f"{name} ({arm.name})": value for name, value in found.items() if name not in facts}
    return facts
