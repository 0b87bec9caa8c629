"""Tiny draft models of other vocabularies, and engines that draft with them."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from draft.cross_vocab import CrossVocabularyDrafter
from draft.model import ModelDrafter
from specdec.config import EngineConfig, SpeculationConfig
from specdec.core.kv_cache import KvCacheManager
from specdec.core.sampling import Sampler
from specdec.core.types import Finished, SpeculationMode, SpeculationParams
from specdec.engine.build import build_parts
from specdec.engine.engine import Engine, EngineParts
from specdec.models.decoder import Decoder, KvPool
from specdec.models.load import HostModel, load_model
from specdec.models.tokenizer import Tokenizer, TokenizerInfo
from tests.core.kv_cache.invariants import check_pages
from tests.engine.tiny_engine import drain
from tests.models.tiny import SPECIALS, make_tiny_model, make_tiny_tokenizer
from verify_kernels.backend_selection import Kernels, load_kernels

CACHE = Path("~/.cache/specdec").expanduser()
PAGES, ROWS, VOCAB = 40, 96, 384
OTHER_TEXT = [
    "class Reader:\n    def read(self, name: str) -> bytes:\n        return open(name, 'rb').read()\n",
    "The brown dog of the other day was not so lazy; it jumped and it was quick to read the event.",
    "naïve façade — 你好, 世界",
]


@functools.cache
def kernels() -> Kernels:
    """The native kernels on two threads."""
    return load_kernels("native", CACHE.expanduser(), 2)


@functools.cache
def folders() -> dict[str, Path]:
    """Model folders: the `target`, its twin under permuted ids, and an unrelated one of another vocabulary."""
    base = Path(tempfile.mkdtemp(prefix="specdec-test-"))
    target = make_tiny_model("llama", base / "target")
    other = make_tiny_model("llama", base / "other", seed=7, vocab_size=330)
    make_other_tokenizer(330).save(str(other / "tokenizer.json"))
    return {"target": target, "permuted": permuted(target, base / "permuted"), "other": other}


def make_other_tokenizer(size: int) -> Backend:
    """A byte-level BPE tokenizer with other words, and one special token fewer, than the tiny target's."""
    tokenizer = Backend(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS[:2]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(OTHER_TEXT * 4, trainer)
    return tokenizer


@functools.cache
def make_tiny(name: str) -> Tokenizer:
    """A tokenizer without a model: the tiny `target`'s, the `other` one, or one that is `spaced` as old ones were."""
    if name == "target":
        backend = make_tiny_tokenizer(Path(tempfile.mkdtemp(prefix="specdec-test-")))
        return Tokenizer(backend.to_str(), TokenizerInfo())
    backend = make_other_tokenizer(330)
    if name == "spaced":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return Tokenizer(backend.to_str(), TokenizerInfo())


def wordy_tokenizer(words: tuple[str, ...], specials: tuple[str, ...] = SPECIALS) -> Tokenizer:
    """A byte-level tokenizer of single bytes and ``words``, longest first if they overlap."""
    return _serialise(Backend(_word_model(words)), specials)


def _word_model(words: tuple[str, ...]) -> Any:
    """BPE whose merges build each word from its start, a character at a time."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        piece = level.pre_tokenize_str(word)[0][0]
        for end in range(2, len(piece) + 1):
            vocab.setdefault(piece[:end], len(vocab))
            merges[piece[: end - 1], piece[end - 1]] = None
    return models.BPE(vocab=vocab, merges=list(merges))


def _serialise(backend: Backend, specials: tuple[str, ...]) -> Tokenizer:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return Tokenizer(backend.to_str(), TokenizerInfo())


def permuted(source: Path, folder: Path, seed: int = 3) -> Path:
    """The same model under other ids: same text in, same text out."""
    folder.mkdir()
    data = json.loads((source / "tokenizer.json").read_text())
    config = json.loads((source / "config.json").read_text())
    ids = list(range(config["vocab_size"]))
    random.Random(seed).shuffle(ids)
    data["model"]["vocab"] = {piece: ids[i] for piece, i in data["model"]["vocab"].items()}
    for token in data["added_tokens"]:
        token["id"] = ids[token["id"]]
    data["added_tokens"].sort(key=lambda token: token["id"])
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_text((source / "tokenizer_config.json").read_text())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config[name] = ids[config[name]]
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    places = [ids.index(i) for i in range(len(ids))]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = weights[name][places].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@functools.cache
def parts(draft: str, **changes: Any) -> EngineParts:
    """Engine parts of the tiny target with the draft model of `folders`, and no other drafter.

    ``changes`` alter the engine's configuration.
    """
    settings: dict[str, Any] = {
        "target": str(folders()["target"]), "draft": str(folders()[draft]), "dtype": "int8", "draft_dtype": "int8",
        "kernels": "native",
        "threads": 2, "cache_dir": CACHE, "kv_tokens": 64 * PAGES, "max_batch": 8, "max_step_rows": ROWS,
        "prefill_chunk": 64, "max_context": 448,
        "speculation": SpeculationConfig(drafters=("model",), profile_s=0.0, max_nodes=12, max_depth=6, width=3),
    }  # fmt: skip
    return build_parts(EngineConfig(**(settings | changes)))


def fresh(made: EngineParts, pages: int | None = None) -> Engine:
    """An engine with an empty KV cache; its drafters are the shared ones."""
    kv = KvCacheManager(pages or made.info.kv_tokens // 64, prefix_cache=True)
    info = made.info
    if pages is not None:
        info = dataclasses.replace(info, max_context=min(info.max_context, pages * 64 - 64))
    return Engine(dataclasses.replace(made, kv=kv, info=info))


@functools.cache
def model(name: str) -> Any:
    """A loaded model of `folders`, in int8."""
    return load_model(str(folders()[name]), dtype="int8", cache_dir=CACHE.expanduser())


def decoder(name: str, pages: int = PAGES, rows: int = ROWS) -> Decoder:
    """A decoder of one of `folders` with an empty pool."""
    return decoder_of(model(name), pages, rows)


def decoder_of(loaded: HostModel, pages: int = PAGES, rows: int = ROWS) -> Decoder:
    """A decoder of a loaded model with an empty pool."""
    return Decoder(
        loaded.config, loaded.weights, kernels().backend(), KvPool(loaded.config, pages, torch.bfloat16),
        max_rows=rows, max_logit_rows=rows, max_positions=500,
    )  # fmt: skip


def own_drafter(made: EngineParts) -> ModelDrafter | CrossVocabularyDrafter:
    """The one drafter of ``made``."""
    (drafter,) = made.drafters
    assert isinstance(drafter, ModelDrafter | CrossVocabularyDrafter)
    return drafter


def forced(nodes: int = 4, depth: int = 4, width: int = 1) -> SpeculationParams:
    """Always draft with the model; by default chains of four."""
    return SpeculationParams(SpeculationMode.ON, ("model",), nodes, depth, width)


def cut(tokenizer: Tokenizer, text: str, rng: random.Random) -> list[int]:
    """``text`` in tokens of which many are not the tokenizer's own choice."""
    data = text.encode()
    by_bytes = {tokenizer.token_bytes(t): t for t in range(tokenizer.vocab_size) if t not in tokenizer.special_ids}
    ids, at = [], 0
    while at < len(data):
        lengths = [n for n in range(1, 9) if data[at : at + n] in by_bytes and at + n <= len(data)]
        length = rng.choice(lengths)
        ids.append(by_bytes[data[at : at + length]])
        at += length
    return ids


@functools.cache
def word_ids() -> tuple[int, ...]:
    """The target's tokens for a space and a whole word: any sequence of them is the tokenizer's own spelling."""
    tokenizer = model("target").tokenizer
    found = []
    for token in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token)
        if re.fullmatch(rb" [a-z]{2,}", data) and tokenizer.encode(data.decode(), add_special=False) == [token]:
            found.append(token)
    assert len(found) > 12
    return tuple(found)


def words(count: int, seed: int) -> tuple[int, ...]:
    """A prompt of ``count`` tokens of `word_ids`."""
    rng = random.Random(seed)
    return tuple(rng.choice(word_ids()) for _ in range(count))


def finished(engine: Engine) -> list[Finished]:
    """Run until idle; returns the finished requests."""
    done = [event for event in drain(engine) if isinstance(event, Finished)]
    assert done
    return done


def rejected(done: list[Finished], least: int = 20) -> int:
    """Draft tokens verified and not accepted. A minimum must have been accepted for the count to be meaningful."""
    accepted = sum(event.stats.num_accepted_draft_tokens for event in done)
    assert accepted >= least, f"only {accepted} draft tokens were accepted"
    return sum(event.stats.num_draft_tokens for event in done) - accepted


def cross_drafter(name: str = "other", pages: int = 40) -> CrossVocabularyDrafter:
    """A drafter outside any engine, with an empty pool."""
    return CrossVocabularyDrafter(
        decoder(name, pages), Sampler(kernels().sampling), model("target").tokenizer, model(name).tokenizer, VOCAB, 8
    )


def books_are_closed(drafter: Any) -> None:
    """No sequence is remembered, and every page is back."""
    assert drafter._readers == {}
    check_pages(drafter._kv, [])
