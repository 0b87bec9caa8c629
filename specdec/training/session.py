"""One run of `specdec train-head`: the target, its texts, the training and the head's folder."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.workloads.prompts import chat, edits, humaneval
from bench.workloads.workload import WorkloadUnavailableError
from specdec.config import EngineConfig, SpeculationConfig
from specdec.engine.build import build_parts
from specdec.engine.engine import Engine, EngineParts
from specdec.models.progress import Progress
from specdec.models.tokenizer import Tokenizer
from specdec.training.collect import AT_ONCE, Collector, Say
from specdec.training.texts import (
    TEXT_TOKENS,
    HeldOut,
    TextStore,
    TrainingError,
    given_files,
    given_prompts,
)
from verify_kernels.forward_batch import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What `train_head` does."""

    target: str
    out: Path
    data: Path  # folder of the texts
    given: tuple[Path, ...] = ()  # files and folders of further texts
    tokens: int = 3_000_000  # of the texts
    hours: float | None = None  # of this run; None: until the work is done
    passes: int = 4  # over the texts; 0: only collect them
    threads: int = 0  # 0: one per core
    cache_dir: Path = EngineConfig.model_fields["cache_dir"].default


def engine_config(plan: TrainingPlan) -> EngineConfig:
    """The target as it is served, for `AT_ONCE` texts at a time."""
    return EngineConfig(
        target=plan.target, cache_dir=plan.cache_dir, threads=plan.threads, max_batch=AT_ONCE,
        kv_tokens=AT_ONCE * (TEXT_TOKENS + 2 * PAGE_SIZE), max_context=TEXT_TOKENS + PAGE_SIZE,
        max_step_rows=TEXT_TOKENS, speculation=SpeculationConfig(enabled=False),
    )  # fmt: skip


def benchmark_prompts(tokenizer: Tokenizer, say: Say) -> Iterator[list[int]]:
    """Tokens of the prompts that `specdec bench` measures on: HumanEval, conversations, edits."""
    for make in (humaneval, chat, edits):
        try:
            for request in make():
                text = request.text or "\n".join(turn.content for turn in request.chat)
                yield tokenizer.encode(text, add_special=False)
        except WorkloadUnavailableError as error:
            say(f"not held out: {error}")


@contextlib.contextmanager
def locked(path: Path, option: str) -> Iterator[None]:
    """Hold a lock file.

    Raises:
        TrainingError: another process holds it, or it cannot be created; the message begins with ``option``.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TrainingError(f"{option}: another run uses {path.parent}; wait for it, or end it") from None
            yield
    except OSError as error:
        raise TrainingError(f"{option}: {path.parent} cannot be written ({error}); choose another folder") from None


def train_head(plan: TrainingPlan, note: Say, show: Say, progress: Progress | None = None) -> None:
    """Collect the texts that are missing, train on them, and write the head.

    note: receives lines to keep; show: a line that replaces the one before.

    Raises:
        TrainingError: the folders hold the work of another target, are in use, or the disk is full.
        ModelError, ConfigError: as `build_parts`.
    """
    deadline_s = float("inf") if plan.hours is None else time.monotonic() + 3600 * plan.hours
    files = given_files(plan.given) if plan.given else []
    parts = build_parts(engine_config(plan), progress)
    collect(plan, parts, files, note, show, deadline_s)


def collect(plan: TrainingPlan, parts: EngineParts, files: list[Path], note: Say, show: Say, deadline_s: float) -> None:
    """Bring the texts to ``plan.tokens`` tokens."""
    store = TextStore(plan.data, parts.info.numeric_fingerprint[:8])
    tokenizer = parts.tokenizer
    held_out = HeldOut(benchmark_prompts(tokenizer, note))
    note(f"held out: every text that shares 10 tokens in a row with one of {held_out.n_prompts} benchmark prompts")
    collector = Collector(Engine(parts), tokenizer, store, held_out, given_prompts(files, tokenizer))
    if collector.n_tokens >= plan.tokens:
        return
    with locked(plan.data / "lock", "--data"):
        collector.run(plan.tokens, show, deadline_s)
    store.close()
