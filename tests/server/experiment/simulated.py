"""Simulated experiments: records drawn from known distributions."""

from __future__ import annotations

from typing import Any

import numpy as np

from server.experiment.config import ExperimentConfig
from server.experiment.folder import Manifest
from server.experiment.records import Record, RecordLog

FACTS = {"cpu": "Simulated <CPU> 3000", "commit": "0123abcd+", "model": "none & nowhere"}


def manifest(**overrides: Any) -> Manifest:
    """A plan of two arms, paired; ``overrides`` are fields of it as its file would have them."""
    fields: dict[str, Any] = {
        "name": "off-or-auto",
        "arms": {
            "off": {"request": {"speculation": "off", "priority": 0}},
            "auto": {"request": {"speculation": "auto", "priority": 0}},
        },
        "primary": {"metric": "e2e_ms", "quantile": 0.5},
    }
    if overrides.get("assignment", {}).get("mode") == "aa":
        fields["arms"] = {"a": {}, "b": {}}
    config = ExperimentConfig.model_validate(fields | overrides)
    return Manifest(config=config, started="2026-11-21T12:00:00+00:00", facts=FACTS)


def paired(plan: Manifest, pairs: int, factor: float, seed: int, noise: float = 0.2) -> RecordLog:
    """Every pair in both arms, order counter-balanced; the second arm takes ``factor`` times as long."""
    rng = np.random.default_rng(seed)
    records = []
    clock = 1000.0
    for pair in range(pairs):
        base = rng.lognormal(-1.5, 0.6)
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        for index in order:
            arm = list(plan.config.arms)[index]
            took = base * rng.lognormal(0, noise) * (factor if index else 1.0)
            records.append(make_record(f"{pair}-{index}", arm, clock, took, rng, index, pair=f"p{pair}"))
            clock += took
    return RecordLog(records)


def switchback(plan: Manifest, blocks: int, per_block: int, factor: float, seed: int) -> RecordLog:
    """Blocks whose requests share a disturbance that is larger than the effect; arms in random balanced order."""
    rng = np.random.default_rng(seed)
    records = []
    drawn = np.concatenate([rng.permutation([0, 1]) for _ in range(-(-blocks // 2))])[:blocks]
    for block, index in enumerate(drawn):
        disturbance = rng.lognormal(0, 0.1)
        for i in range(per_block):
            arm = list(plan.config.arms)[index]
            took = rng.lognormal(-1.5, 0.3) * disturbance * (factor if index else 1.0)
            records.append(make_record(f"{block}-{i}", arm, 20.0 * block + i / 10, took, rng, int(index), block=block))
    return RecordLog(records)


def make_record(
    name: str, arm: str, arrival: float, took: float, rng: np.random.Generator, index: int, **fields: Any
) -> Record:
    """A request that ended well: a tenth of its time until the first of 33 tokens, 1 ms in the queue."""
    accepted = tuple(map(int, rng.multinomial(20, [0.3, 0.3, 0.2, 0.2]))) if index else (33,)
    return Record(
        name,
        arm,
        arrival,
        scheduled=arrival,
        started=arrival + 0.001 * rng.lognormal(0, 0.05),
        first_token=arrival + took / 10,
        end=arrival + took,
        tokens=33,
        accepted=accepted,
        token_hash=b"same",
        **fields,
    )
