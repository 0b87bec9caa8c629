"""One run of `specdec train-head`: the target, its texts, the training and the head's folder."""

from __future__ import annotations

import contextlib
import fcntl
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.workloads.prompts import chat, edits, humaneval
from bench.workloads.workload import WorkloadUnavailableError
from draft.head_checkpoint import usual_aux_layers
from specdec.config import EngineConfig, SpeculationConfig
from specdec.engine.build import build_parts
from specdec.engine.engine import Engine, EngineParts
from specdec.errors import PART_DIGITS
from specdec.models.memory import measure_model
from specdec.models.progress import Progress
from specdec.models.tokenizer import Tokenizer
from specdec.training.collect import AT_ONCE, Collector, Say
from specdec.training.head_files import (
    TargetTables,
    config_json,
    draft_vocabulary,
    model_card,
    new_head,
    write_head,
)
from specdec.training.head_trainer import BatchMaker, Trainer, TrainingRecipe
from specdec.training.states import StateFile
from specdec.training.texts import (
    TEXT_TOKENS,
    HeldOut,
    Text,
    TextSplit,
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
    config = engine_config(plan)
    shape = measure_model(config.target, dtype=config.dtype, cache_dir=config.cache_dir, progress=progress).config
    parts = build_parts(config, progress, aux_layers=usual_aux_layers(shape.n_layers))
    benchmarks = list(benchmark_prompts(parts.tokenizer, note))
    collect(plan, parts, files, benchmarks, note, show, deadline_s)
    if plan.passes == 0:
        return
    with locked(plan.data / "lock", "--data"), locked(plan.out / "lock", "--out"):
        texts = list(TextStore(plan.data, _weights(parts)).read())
        width = parts.decoder.config.hidden_size * len(parts.decoder.aux_layers)
        states = StateFile(plan.data, texts, width, parts.info.vocab_size)
        states.fill(parts.decoder, show, deadline_s)
        if states.n_texts == len(texts):
            train(plan, parts, texts, states, benchmarks, note, show, deadline_s)


def _weights(parts: EngineParts) -> str:
    """What identifies the target's weights in a folder of texts."""
    return parts.info.numeric_fingerprint[:PART_DIGITS]


def collect(
    plan: TrainingPlan, parts: EngineParts, files: list[Path], benchmarks: list[list[int]],
    note: Say, show: Say, deadline_s: float,
) -> None:  # fmt: skip
    """Bring the texts to ``plan.tokens`` tokens."""
    store = TextStore(plan.data, _weights(parts))
    tokenizer = parts.tokenizer
    held_out = HeldOut(benchmarks)
    note(f"held out: every text that shares 10 tokens in a row with one of {held_out.n_prompts} benchmark prompts")
    collector = Collector(Engine(parts), tokenizer, store, held_out, given_prompts(files, tokenizer))
    if collector.n_tokens >= plan.tokens:
        return
    with locked(plan.data / "lock", "--data"):
        collector.run(plan.tokens, show, deadline_s)
    store.close()


def train(
    plan: TrainingPlan, parts: EngineParts, texts: list[Text], states: StateFile, benchmarks: list[list[int]],
    note: Say, show: Say, deadline_s: float,
) -> None:  # fmt: skip
    """Train as far as the time allows, and write the head's folder."""
    info, decoder = parts.info, parts.decoder
    split = TextSplit.of(texts, benchmarks)
    if not split.training:
        raise TrainingError("--tokens: every text is held out; collect more")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(info.threads)  # the target's kernels, which have threads of their own, are done
    place = {id(text): number for number, text in enumerate(texts)}
    numbers = [place[id(text)] for text in split.training]
    tables = TargetTables.of(decoder)
    target_ids = draft_vocabulary(split.token_counts(info.vocab_size))
    make = BatchMaker(states, target_ids, info.vocab_size, device)
    features = torch.cat([make([texts[n]], [n]).features[0] for n in numbers[:16]]).cpu()
    head = new_head(decoder.config, tables, target_ids, features, TEXT_TOKENS + PAGE_SIZE).to(device)
    digest = zlib.crc32(b"".join(text.tokens.tobytes() for text in split.training), len(texts))
    trainer = Trainer(
        head, tables.embed.to(device), make, texts, numbers, [place[id(text)] for text in split.held_out],
        TrainingRecipe(plan.passes), f"{digest:08x}", plan.out / "checkpoint.pt",
    )  # fmt: skip
    trainer.run(show, deadline_s)
    acceptance = trainer.acceptance() if split.held_out else []
    config = config_json(head.config, info.target, len(target_ids), acceptance)
    done = trainer.step / trainer.n_steps
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{info.threads} CPU threads"
    card = model_card(
        config, split.training, len(split.held_out), split.n_dropped, done * plan.passes, trainer.seconds / 3600, name
    )
    write_head(plan.out, head, target_ids, config, card)
    shares = " ".join(f"{share:.2f}" for share in acceptance) or "no held-out text"
    rest = "" if trainer.step == trainer.n_steps else f", {done:.0%} of the training; run again to go on"
    note(f"{plan.out}: accepted by position {shares}{rest}")
