"""All counted runs of one workload, and what they amount to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.engine_group_run import GroupRun
from bench.engine_request_run import RequestRun
from bench.engine_workload_summary import WorkloadSummary
from specdec.types import DrafterStats


@dataclass(slots=True)
class WorkloadRuns:
    """``rounds``: per counted group, its run in every arm by the arm's name."""

    workload: str
    concurrent: bool
    rounds: list[dict[str, GroupRun]] = field(default_factory=list)

    def pairs(self, first: str, second: str) -> Iterator[tuple[RequestRun, RequestRun]]:
        """Every request's run in the one arm and in the other."""
        for by_arm in self.rounds:
            yield from zip(by_arm[first].requests, by_arm[second].requests, strict=True)

    def ms_per_token(self, arm: str) -> float | None:
        """Milliseconds of decoding per output token over the whole workload; where requests run at once, of all of them
        together, while all places are taken. None when nothing was long enough to time."""
        if self.concurrent:
            seconds = sum(by_arm[arm].full_s for by_arm in self.rounds)
            tokens = sum(by_arm[arm].full_tokens for by_arm in self.rounds)
        else:
            runs = [run for by_arm in self.rounds for run in by_arm[arm].requests]
            seconds, tokens = sum(run.decode_s for run in runs), sum(run.gaps for run in runs)
        return seconds / tokens * 1e3 if tokens and seconds > 0 else None

    def summary(self, base: str = "off", arm: str = "auto") -> WorkloadSummary:
        """``arm`` against ``base``."""
        timed = [(a.tpot_ms / b.tpot_ms, b.prompt) for a, b in self.pairs(base, arm) if a.tpot_ms and b.tpot_ms]
        ratios = [ratio for ratio, _ in timed]
        base_ms, arm_ms = self.ms_per_token(base), self.ms_per_token(arm)
        base_s, arm_s = (sum(by_arm[name].total_s for by_arm in self.rounds) for name in (base, arm))
        p10, median, p90 = (float(x) for x in np.percentile(ratios, (10, 50, 90))) if ratios else (None, None, None)
        worst, worst_prompt = min(timed) if timed else (None, "")
        runs = [run for by_arm in self.rounds for run in by_arm[arm].requests]
        steps = sum(run.stats.num_steps for run in runs)
        return WorkloadSummary(
            workload=self.workload,
            concurrent=self.concurrent,
            prompts=len(runs),
            timed=len(timed),
            base_ms=base_ms,
            arm_ms=arm_ms,
            ratio_p10=p10,
            ratio_median=median,
            ratio_p90=p90,
            total_ratio=base_ms / arm_ms if base_ms and arm_ms else None,
            whole_ratio=base_s / arm_s if self.concurrent and arm_s > 0 else None,
            worst=worst,
            worst_prompt=worst_prompt,
            tokens_per_step=sum(len(run.tokens) for run in runs) / steps if steps else None,
            drafters=_by_drafter(runs),
        )

    def as_dict(self) -> list[dict[str, Any]]:
        """Per prompt, its figures in every arm, JSON-able."""
        return [
            {
                "prompt": runs[0].prompt,
                "round": number,
                "arms": {name: run.as_dict() for name, run in zip(by_arm, runs, strict=True)},
                "ratio": _ratio(by_arm, index),
            }
            for number, by_arm in enumerate(self.rounds)
            for index, runs in enumerate(zip(*(group.requests for group in by_arm.values()), strict=True))
        ]


def _ratio(by_arm: dict[str, GroupRun], index: int) -> float | None:
    off, auto = by_arm["off"].requests[index].tpot_ms, by_arm["auto"].requests[index].tpot_ms
    return round(off / auto, 4) if off and auto else None


def _by_drafter(runs: list[RequestRun]) -> dict[str, DrafterStats]:
    found: dict[str, DrafterStats] = {}
    for name, part in ((n, p) for run in runs for n, p in run.stats.by_drafter.items()):
        total = found.setdefault(name, DrafterStats())
        total.num_draft_tokens += part.num_draft_tokens
        total.num_accepted_draft_tokens += part.num_accepted_draft_tokens
    return found
