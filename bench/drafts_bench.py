"""Compares feature heads and draft models for one target on the same prompts, and says which one to keep."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engine_bench import BenchError, EngineBench, Say, WorkloadRuns
from bench.engine_runs import OFF, Setting
from bench.engine_session import SEED, check_room
from bench.machine import engine_facts
from bench.serve.schedule import recorded
from bench.workloads.prompts import tokenised
from bench.workloads.workload import Workload, WorkloadUnavailableError, uncounted
from draft.head_checkpoint import is_head, parse_head_config
from specdec.config import EngineConfig
from specdec.control.estimates.costs import CostTable
from specdec.core.types import POSITIONS, DrafterStats, SamplingParams
from specdec.engine.build import build_parts, with_profile
from specdec.engine.engine import Engine, EngineParts
from specdec.engine.profile_costs import profile_costs
from specdec.errors import ConfigError, SpecdecError
from specdec.load.figures import rounded
from specdec.load.request import LoadRequest
from specdec.load.trace_file import read_trace_lines
from specdec.models.checkpoint import read_json
from specdec.models.memory import measure_model
from specdec.models.progress import Progress
from specdec.models.tokenizer import Tokenizer

ARM_TOKENS = 4096  # of KV cache per arm, unless more is configured: all arms run at the same time


@dataclass(frozen=True, slots=True)
class Candidate:
    """A head or a draft model, loaded."""

    name: str  # "head FOLDER" or "draft MODEL"
    parts: EngineParts  # the target, the drafters without a model, and this one last
    level_ms: float  # of a level of one row, or of the forward that grows the tree of one sequence

    @property
    def drafter(self) -> str:
        """Name of its drafter."""
        return self.parts.drafters[-1].name

    @property
    def chain(self) -> Setting:
        """The arm that shows the acceptance by position: this drafter alone, always `POSITIONS` tokens in a row."""
        fixed = Setting.fixed(POSITIONS, 1, POSITIONS)
        alone = dataclasses.replace(fixed.speculation, drafters=(self.drafter,))
        return Setting(f"{self.name} {fixed.name}", alone)


def load_candidates(
    config: EngineConfig, heads: Seq[str], drafts: Seq[str], progress: Progress | None = None
) -> tuple[EngineParts, list[Candidate]]:
    """The target's parts with the drafters that need no model, loaded once, and every candidate beside it.

    Raises:
        BenchError: there is no candidate, or one cannot draft for the target; names its option.
        SpecdecError: the target cannot be loaded.
    """
    given = [*(("head", ref) for ref in heads), *(("draft", ref) for ref in drafts)]
    if not given:
        raise BenchError("--head, --draft: nothing to compare; give at least one of them")
    lookup = config.speculation.model_copy(update={"drafters": ("grammar", "prediction", "suffix")})
    kv_tokens = max(config.kv_tokens, ARM_TOKENS * 2 * (1 + len(given)))
    config = config.model_copy(
        update={"draft": None, "draft_head": None, "speculation": lookup, "kv_tokens": kv_tokens}
    )  # fmt: skip
    shape = measure_model(config.target, dtype=config.dtype, cache_dir=config.cache_dir, progress=progress).config
    layers: dict[int, None] = {}
    for ref in heads:  # before the target is loaded, so that errors come early
        with _named("head", ref):
            raw = read_json(Path(ref).expanduser() / "config.json")
            layers |= dict.fromkeys(parse_head_config(raw, ref, shape).aux_layers)
    base = build_parts(config, progress, aux_layers=tuple(layers))
    return base, [_load(base, kind, ref) for kind, ref in given]


@contextlib.contextmanager
def _named(kind: str, ref: str) -> Iterator[None]:
    """Puts the option before the message of an error in its block."""
    try:
        yield
    except SpecdecError as error:
        raise BenchError(f"--{kind} {ref}: {error}") from None


def _load(base: EngineParts, kind: str, ref: str) -> Candidate:
    assert base.load_draft is not None  # `build_parts` gives it
    with _named(kind, ref):
        if is_head(ref) != (kind == "head"):
            raise BenchError("a feature head; give it by --head" if kind == "draft" else "no feature head; use --draft")
        _, drafter = base.load_draft(ref, base.config.draft_dtype)
    costs = profile_costs(base.decoder, [drafter], base.config.speculation.profile_s)
    parts = dataclasses.replace(base, drafters=[*base.drafters, drafter], costs=costs if base.costs else None)
    level_ms = CostTable.from_dict(costs.drafting[drafter.name]).ms(max(1, drafter.tree_rows), 0)
    return Candidate(f"{kind} {ref}", with_profile(parts, None), level_ms)


def file_prompts(file: Path, tokenizer: Tokenizer, count: int, max_tokens: int | None) -> Workload:
    """The first ``count`` prompts of a trace (`TraceLine`), after one that warms up.

    Raises:
        BenchError: the file cannot be read, or a line cannot be used; names it.
    """
    found: list[LoadRequest] = []
    try:
        for place, line in read_trace_lines(file)[: count + 1]:
            if line.prompt_blocks is not None:
                raise BenchError(f"--prompts-file: {place}: no text; capture with --capture-prompts")
            ask = recorded(line, line.name or place)
            found.append(tokenised(dataclasses.replace(ask, max_tokens=max_tokens or ask.max_tokens), tokenizer))
    except ConfigError as error:
        raise BenchError(f"--prompts-file: {str(error).removeprefix('trace: ')}") from None
    except WorkloadUnavailableError as error:
        raise BenchError(f"--prompts-file: {place}: {error}") from None
    if len(found) < 2:
        raise BenchError(f"--prompts-file {file}: {len(found)} prompts; give two or more, the first is a warm-up")
    return Workload("prompts", tuple((prompt,) for prompt in [*uncounted(found[:1]), *found[1:]]))


NO_CANDIDATE = Setting("no candidate")  # the drafters that need no model, alone


@dataclass(slots=True)
class DraftsReport:
    machine: dict[str, Any]
    candidates: Seq[Candidate]
    runs: WorkloadRuns
    stopped: bool = False  # by Ctrl-C, before its end

    def figures(self) -> dict[str, dict[str, Any]]:
        """By arm, its time from off's first token on, and the accepted share of a chain's tokens by position."""
        found: dict[str, dict[str, Any]] = {}
        off = self.runs.ms_per_token_beside_off(OFF.name)
        for arm in (OFF.name, NO_CANDIDATE.name, *(candidate.name for candidate in self.candidates)):
            ms = self.runs.ms_per_token_beside_off(arm)
            pairs = self.runs.pairs(OFF.name, arm)
            faster = sum(b.first_s + b.decode_s < a.first_s + a.decode_s for a, b in pairs)
            found[arm] = {
                "ms_per_token": rounded(ms),
                "ratio": rounded(off / ms) if off and ms else None,
                "faster_on": faster,
                "tokens_per_step": rounded(self.runs.tokens_per_step(arm)),
            }
        for candidate in self.candidates:
            stats = self.runs.drafters(candidate.chain.name).get(candidate.drafter, DrafterStats())
            acceptance = [rounded(share) for share in stats.acceptance]
            found[candidate.name] |= {"level_ms": rounded(candidate.level_ms), "acceptance": acceptance}
        return found

    def as_dict(self) -> dict[str, Any]:
        """All figures, including every prompt's, as JSON types. ``keep``: the candidate, "none" unless one is the
        fastest arm."""
        arms, prompts = self.figures(), self.runs.as_dict(NO_CANDIDATE.name)
        times = {arm: row["ms_per_token"] for arm, row in arms.items() if row["ms_per_token"] is not None}
        keep, reason = "none", "no answer was long enough to time; raise --max-tokens"
        if times:
            best, *others = sorted(times, key=lambda arm: times[arm])
            keep = "none" if best in (OFF.name, NO_CANDIDATE.name) else best
            rest = ", ".join(f"{arm} {times[arm]:.2f}" for arm in others)
            wins = f", faster than off on {arms[best]['faster_on']} of {len(prompts)} prompts"
            reason = f"{best} takes {times[best]:.2f} ms per token{'' if best == OFF.name else wins}; {rest}"
        about = {"machine": self.machine, "stopped": self.stopped}
        return {**about, "arms": arms, "keep": keep, "reason": reason, "prompts": prompts}


def compare(base: EngineParts, candidates: Seq[Candidate], workloads: Seq[Workload], say: Say) -> DraftsReport:
    """Run every prompt greedily in every arm, step by step in turns (`EngineBench`). After Ctrl-C the report has what
    was measured until then, if that is anything.

    Raises:
        BenchError: an arm returned other tokens than plain decoding, the engine failed, or the KV cache is too small.
        RequestError: the engine refused a prompt.
    """
    arms = {OFF: base, NO_CANDIDATE: base}
    for candidate in candidates:
        arms |= dict.fromkeys((Setting(candidate.name), candidate.chain), candidate.parts)
    check_room(base, workloads, len(arms))
    engines = {arm: Engine(parts) for arm, parts in arms.items()}
    bench = EngineBench(engines, SamplingParams(temperature=0.0, seed=SEED), say)
    report = DraftsReport(engine_facts(base.config, base.info), candidates, WorkloadRuns("drafts", False))
    try:
        for workload in workloads:
            for by_arm in bench.rounds(workload):
                report.runs.rounds.append(by_arm)
    except KeyboardInterrupt:
        if not report.runs.rounds:
            raise
        report.stopped = True
    return report
