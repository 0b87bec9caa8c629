"""One run of `specdec train-head`: the target, its texts, the training and the drafter's folder."""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.workloads.prompts import chat, edits, humaneval
from bench.workloads.workload import WorkloadUnavailableError
from draft.head_checkpoint import is_head, usual_aux_layers
from draft.index_build import index_texts
from specdec.config import EngineConfig, load_config
from specdec.engine.build import build_parts
from specdec.engine.engine import Engine, EngineParts
from specdec.errors import PART_DIGITS
from specdec.models.checkpoint import Checkpoint
from specdec.models.fetch import file_lock
from specdec.models.memory import measure_model
from specdec.models.progress import Progress, silent
from specdec.models.resolve import AdapterCheckpoint, resolve
from specdec.models.tokenizer import Tokenizer
from specdec.models.transformers_model import read_with_transformers
from specdec.training.card import CARD_MARK, TrainingResult, model_card
from specdec.training.collect import AT_ONCE, Collector, Say
from specdec.training.draft_model import FULL_RATE, LOW_RANK_RATE, DraftModel
from specdec.training.head_files import TargetTables, config_json, draft_vocabulary, new_head, write_head
from specdec.training.head_module import HeadModule
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
from specdec.training.trainer import BatchMaker, Trainer, TrainingRecipe
from verify_kernels.forward_batch import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What `train_drafter` does."""

    target: str
    out: Path
    data: Path  # folder of the texts
    given: tuple[Path, ...] = ()  # files and folders of further texts
    tokens: int = 3_000_000  # of the texts
    hours: float | None = None  # of this run; None: until the work is done
    passes: int = 4  # over the texts; 0: only collect them
    draft: str | None = None  # the small model that is trained; None: a new head
    rank: int = 16  # of what is added to a draft model's matrices; 0: all of its weights are trained
    threads: int = 0  # 0: one per core
    cache_dir: Path = EngineConfig().cache_dir
    index: bool = False  # write an index of the texts, and train nothing


def engine_config(plan: TrainingPlan) -> EngineConfig:
    """The target as it is served, for `AT_ONCE` texts at a time. Raises ConfigError if a value is out of range."""
    given = {
        "target": plan.target, "cache_dir": plan.cache_dir, "threads": plan.threads, "max_batch": AT_ONCE,
        "kv_tokens": AT_ONCE * (TEXT_TOKENS + 2 * PAGE_SIZE), "max_context": TEXT_TOKENS + PAGE_SIZE,
        "max_step_rows": TEXT_TOKENS, "speculation.enabled": False,
    }  # fmt: skip
    return load_config(None, {f"engine.{name}": value for name, value in given.items()}).engine


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

    def refuse() -> None:
        raise TrainingError(f"{option}: another run uses {path.parent}; wait for it, or end it")

    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock(path, on_wait=refuse))
        except OSError as error:
            raise TrainingError(f"{option}: {path.parent} cannot be written ({error}); choose another folder") from None
        yield


def train_drafter(plan: TrainingPlan, note: Say, show: Say, progress: Progress | None = None) -> None:
    """Collect the texts that are missing, train on them, and write the drafter.

    note: receives lines to keep; show: a line that replaces the one before.

    Raises:
        TrainingError: the folders are the same, hold the work of another target, are in use, or the disk is full; the
            target's context is too short; the draft model has another vocabulary.
        ModelError, ConfigError: as `build_parts`.
    """
    if plan.data.resolve() == plan.out.resolve():
        raise TrainingError(f"--data: {plan.data} is the folder of --out; give one of its own")
    if plan.passes and not plan.index:
        _check_out(plan)
    deadline_s = float("inf") if plan.hours is None else time.monotonic() + 3600 * plan.hours
    files = given_files(plan.given) if plan.given else []
    config = engine_config(plan)
    shape = measure_model(config.target, dtype=config.dtype, cache_dir=config.cache_dir, progress=progress).config
    if shape.max_context < config.max_context:
        raise TrainingError(
            f"--target: {plan.target} has a context of {shape.max_context} tokens, and a training needs "
            f"{config.max_context}; name another model"
        )
    parts = build_parts(
        config, progress, aux_layers=() if plan.draft or plan.index else usual_aux_layers(shape.n_layers)
    )
    draft = _draft_checkpoint(plan, parts.tokenizer, progress) if plan.draft else None
    store = TextStore(plan.data, parts.info.numeric_fingerprint[:PART_DIGITS])
    benchmarks = list(benchmark_prompts(parts.tokenizer, note))
    collect(plan, parts, store, files, benchmarks, note, show, deadline_s)
    if plan.index:
        write_answers(plan, parts, store, note)
        return
    if plan.passes == 0:
        return
    with locked(plan.data / "lock", "--data"), locked(plan.out / "lock", "--out"):
        texts = list(store.read())
        width = parts.decoder.config.hidden_size * len(parts.decoder.aux_layers)
        states = StateFile(plan.data, texts, width, parts.info.vocab_size)
        states.fill(parts.decoder, show, deadline_s)
        if texts and states.n_texts == len(texts):
            train(plan, parts, draft, texts, states, benchmarks, note, show, deadline_s)
        else:
            note(f"--hours: over after the hidden states of {states.n_texts} of {len(texts)} texts; run again to go on")


def _check_out(plan: TrainingPlan) -> None:
    """Raises TrainingError if files that are not of this training would be replaced, such as the target's weights."""
    folder, card = plan.out, plan.out / "README.md"
    for option, model in (("--target", plan.target), ("--draft", plan.draft)):
        if model and Path(os.path.expanduser(model)).resolve() == folder.resolve():
            raise TrainingError(f"--out: {folder} is the folder of {option}; give one of its own")
    found = [name for name in ("config.json", "model.safetensors", card.name) if (folder / name).exists()]
    trained = (folder / "checkpoint.pt").exists() or (card.is_file() and CARD_MARK.encode() in card.read_bytes())
    if found and not trained:
        raise TrainingError(f"--out: {folder} has a {' and a '.join(found)} already; give a folder of its own")


def _draft_checkpoint(plan: TrainingPlan, target: Tokenizer, progress: Progress | None) -> Checkpoint:
    """The draft model's file or folder."""
    assert plan.draft is not None
    checkpoint = resolve(plan.draft, plan.cache_dir, progress or silent)
    if not checkpoint.path.exists():
        raise TrainingError(f"--draft: {plan.draft} has no file to read; give a folder, a GGUF file or a known name")
    if isinstance(checkpoint, AdapterCheckpoint):
        raise TrainingError(
            f"--draft: {plan.draft} is an adapter; merge it (peft: merge_and_unload), and save the model"
        )
    if is_head(checkpoint.path):
        raise TrainingError(f"--draft: {plan.draft} is a feature head; name a draft model")
    if checkpoint.open().config.mask_token is not None:
        raise TrainingError(f"--draft: {plan.draft} is a parallel draft, which is not trained here; name another model")
    tokenizer = checkpoint.tokenizer(plan.cache_dir)
    if tokenizer.fingerprint != target.fingerprint:
        raise TrainingError(
            f"--draft: {checkpoint.name} has another vocabulary than the target; choose a model of its family"
        )
    return checkpoint


def collect(
    plan: TrainingPlan, parts: EngineParts, store: TextStore, files: list[Path], benchmarks: list[list[int]],
    note: Say, show: Say, deadline_s: float,
) -> None:  # fmt: skip
    """Collect texts until they have ``plan.tokens`` tokens. If a training on them has begun, nothing is added."""
    tokenizer = parts.tokenizer
    held_out = HeldOut(benchmarks)
    note(f"held out: every text that shares 10 tokens in a row with one of {len(benchmarks)} benchmark prompts")
    collector = Collector(Engine(parts), tokenizer, store, held_out, given_prompts(files, tokenizer, note))
    if collector.n_tokens >= plan.tokens:
        return
    if plan.passes and not plan.index and collector.n_texts and (plan.out / "checkpoint.pt").exists():
        note(
            f"texts: {collector.n_tokens:,} tokens, on which the training has begun; give another --out to collect more"
        )
        return
    with locked(plan.data / "lock", "--data"):
        reason = collector.run(plan.tokens, show, deadline_s)
    store.close()
    if reason:
        note(f"texts: {collector.n_tokens:,} tokens, and no more can be collected: {reason}")


def write_answers(plan: TrainingPlan, parts: EngineParts, store: TextStore, note: Say) -> None:
    """Write `answers.index`, of all collected texts. Raises TrainingError if there is none."""
    with locked(plan.out / "lock", "--out"):
        texts = [text.tokens[text.lead :] for text in store.read()]
        if not texts:
            raise TrainingError("--hours: over before a text was complete; run again with more")
        path = plan.out / "answers.index"
        size = index_texts(path, texts, parts.tokenizer)
    note(f"{path}: {sum(map(len, texts)):,} tokens, {size / 1e6:.1f} MB")


def train(
    plan: TrainingPlan, parts: EngineParts, draft: Checkpoint | None, texts: list[Text], states: StateFile,
    benchmarks: list[list[int]], note: Say, show: Say, deadline_s: float,
) -> None:  # fmt: skip
    """Train as far as the time allows, and write the drafter's folder. draft: the model to train; None: a new head."""
    info = parts.info
    split = TextSplit.of(texts, benchmarks)
    if not split.training:
        raise TrainingError("--tokens: every text is held out; collect more")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(info.threads)  # the target's kernels, which have threads of their own, are done
    place = {id(text): number for number, text in enumerate(texts)}
    numbers, held_out = ([place[id(text)] for text in part] for part in (split.training, split.held_out))
    digest = zlib.crc32(b"".join(text.tokens.tobytes() for text in split.training), len(texts))
    key: dict[str, str | int] = {"data": f"{digest:08x}"}
    student: HeadModule | DraftModel
    if draft is None:
        target_ids = draft_vocabulary(split.token_counts(info.vocab_size))
        make = BatchMaker(states, target_ids, info.vocab_size, device)
        features = torch.cat([make([texts[n]], [n]).features[0] for n in numbers[:16]]).cpu()
        tables = TargetTables.of(parts.decoder)
        student = new_head(parts.decoder.config, tables, target_ids, features, TEXT_TOKENS + PAGE_SIZE)
        recipe = TrainingRecipe(plan.passes)
    else:
        student = DraftModel(read_with_transformers(draft.path, torch.float32), plan.rank)
        target_ids = np.arange(min(info.vocab_size, student.vocab_size))
        make = BatchMaker(states, target_ids, info.vocab_size, device)
        recipe = TrainingRecipe(plan.passes, rate=LOW_RANK_RATE if plan.rank else FULL_RATE)
        key |= {"draft": f"{draft.name} {draft.fingerprint()[:PART_DIGITS]}", "rank": plan.rank}
    path = plan.out / "checkpoint.pt"
    trainer = Trainer(student.to(device), make, texts, numbers, held_out, recipe, key, path)
    trainer.run(show, deadline_s)
    done = trainer.step / trainer.n_steps
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{info.threads} CPU threads"
    result = TrainingResult(
        split, done * plan.passes, trainer.tokens, trainer.seconds, name, trainer.first, trainer.acceptance()
    )
    if isinstance(student, HeadModule):
        config = config_json(student.config, info.target, len(target_ids), result.acceptance)
        write_head(plan.out, student, target_ids, config, _head_card(plan, config, result))
    else:
        student.write(plan.out, parts.tokenizer, _draft_card(plan, result))
    note(_summary(plan.out, done, result))


def _summary(folder: Path, done: float, result: TrainingResult) -> str:
    """The run's last line. done: the share of the training."""
    first, last = (" ".join(f"{share:.2f}" for share in shares) for shares in (result.first, result.acceptance))
    measured = (
        f"accepted by position {last} (before {first})" if last else "acceptance not measured, no text is held out"
    )
    rest = "" if done == 1 else f", {done:.0%} of the training; run again to go on"
    return f"{folder}: {measured}{rest}"


def _head_card(plan: TrainingPlan, config: dict[str, Any], result: TrainingResult) -> str:
    about = (
        f"One layer in EAGLE-3's layout; the output table has {config['draft_vocab_size']:,} of the target's\n"
        f"{config['vocab_size']:,} tokens; the embedding is the target's."
    )
    command = f"specdec train-head --target {plan.target} --out FOLDER"
    serve = f"--target {plan.target} --draft-head FOLDER"
    return model_card(f"EAGLE-3 head for {plan.target}", command, about, serve, result)


def _draft_card(plan: TrainingPlan, result: TrainingResult) -> str:
    how = f"matrices of rank {plan.rank} added to its linear layers" if plan.rank else "all of its weights"
    command = f"specdec train-head --target {plan.target} --kind model --draft {plan.draft} --out FOLDER"
    about = f"{plan.draft}, trained on the target's distributions through {how}."
    serve = f"--target {plan.target} --draft FOLDER"
    return model_card(f"Draft model for {plan.target}", command, about, serve, result)
