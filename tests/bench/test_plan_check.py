"""A plan compared with real servers under the same arrivals. Prints how far off it is."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from specdec.config import Config, EngineConfig
from tests.bench.plan_check import CheckPlan, check_plan


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_plan_and_a_real_load(tmp_path: Path, replicas: int) -> None:
    config = Config(engine=EngineConfig(target="smollm2-135m"))
    report = asyncio.run(check_plan(config, CheckPlan(replicas), tmp_path, print))
    print(json.dumps(report.as_dict()))
    # How far off it is depends on what else the machine does; that all was asked and planned does not.
    real, planned = report.measured.answered, report.planned.answered
    requests = report.measured.as_dict(requests=False)["requests"]
    assert requests["ok"] == requests["sent"] == len(planned)
    assert sum(record.output_tokens for record in real) == sum(record.output_tokens for record in planned)
    assert sum(record.prompt_tokens for record in real) == sum(record.prompt_tokens for record in planned)
    assert report.profile.drafted
