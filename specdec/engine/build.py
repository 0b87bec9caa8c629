"""Builds an engine from its configuration: kernels, weights, caches, drafters."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import cast

import specdec
from draft.cross_vocab import CrossVocabularyDrafter
from draft.model import ModelDrafter
from draft.protocol import CostlyDrafter, Drafter
from draft.suffix import SuffixDrafter
from specdec.config import EngineConfig
from specdec.engine.engine import Engine, EngineParts
from specdec.engine.profile_costs import profile_costs
from specdec.errors import ConfigError, ModelError
from specdec.kv_cache import KvCacheManager
from specdec.models import LoadedModel, Progress, load_model
from specdec.models.decoder import Decoder
from specdec.models.kv_pool import KvPool
from specdec.models.memory import available_bytes
from specdec.models.model_config import ModelConfig
from specdec.sampling import Sampler
from specdec.types import EngineInfo
from verify_kernels.backend import Backend
from verify_kernels.forward_batch import PAGE_SIZE
from verify_kernels.kernels import Kernels, load_kernels
from verify_kernels.self_test import self_test

DEFAULT_CONTEXT = 8192


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Load everything ``config`` names.

    Raises:
        ModelError, KernelError: a model or the kernels can not be had; the message tells the way out.
        ConfigError: the parts do not fit each other, or ``strict`` is set and the numbers are not bitwise.
    """
    return Engine(build_parts(config, progress))


def build_parts(config: EngineConfig, progress: Progress | None = None) -> EngineParts:
    """What `build_engine` assembles; raises as it does."""
    cores = len(os.sched_getaffinity(0))
    if config.threads > cores:
        raise ConfigError(f"engine.threads: {config.threads} threads on {cores} cores only get in each other's way")
    threads = config.threads or cores
    kernels = load_kernels(config.kernels, config.cache_dir, threads)
    mode = self_test(kernels.backend(), config.dtype)
    if config.strict and mode != "bitwise":
        raise ConfigError(f"engine.strict: {kernels.name} kernels are {mode} here; drop strict or change engine.dtype")
    target = load_model(config.target, dtype=config.dtype, cache_dir=config.cache_dir, progress=progress)
    max_context = context_limit(config, target.config)
    pages = -(-max(config.kv_tokens, PAGE_SIZE) // PAGE_SIZE)
    decoder = _decoder(config, target, kernels.backend(), pages, max_context)
    sampler = Sampler(kernels.sampling, threads)
    drafters, draft_name = _drafters(config, target, kernels, pages, max_context, sampler, progress)
    info = EngineInfo(
        target=target.name, draft=draft_name, dtype=config.dtype, kernels=kernels.name, numeric_mode=mode,
        max_context=max_context, vocab_size=target.config.vocab_size, kv_tokens=pages * PAGE_SIZE,
        max_batch=config.max_batch, drafters=tuple(d.name for d in drafters), eos_ids=tuple(target.tokenizer.eos_ids),
        threads=threads, version=specdec.__version__,
    )  # fmt: skip
    kv = KvCacheManager(pages, prefix_cache=config.prefix_cache)
    costs = None
    if config.speculation.enabled and drafters and config.speculation.profile_s > 0:
        costly = [cast(CostlyDrafter, drafter) for drafter in drafters if drafter.costly]
        costs = profile_costs(decoder, costly, config.speculation.profile_s)
    return EngineParts(config, info, target.tokenizer, decoder, sampler, kv, drafters, costs)


def context_limit(config: EngineConfig, model: ModelConfig) -> int:
    """Longest sequence served: what was asked for, within the model's own limit and the whole KV cache.

    Raises:
        ConfigError: more context was asked for than the model has.
    """
    if config.max_context > model.max_context:
        raise ConfigError(f"engine.max_context: {config.max_context} exceeds the model's {model.max_context}")
    wanted = config.max_context or min(model.max_context, DEFAULT_CONTEXT)
    # One page stays free of context so that a lone sequence always has room for a tree.
    return max(1, min(wanted, -(-config.kv_tokens // PAGE_SIZE) * PAGE_SIZE - PAGE_SIZE))


def _decoder(
    config: EngineConfig,
    model: LoadedModel,
    backend: Backend,
    pages: int,
    positions: int,
    already_promised: int = 0,
) -> Decoder:
    need = pages * KvPool.bytes_per_page(model.config)
    # Pools and logits take their memory page by page: what is promised is not yet missing from what is free.
    promised = config.max_step_rows * model.config.vocab_size * 4 + already_promised
    free = available_bytes() - promised
    if need > free:
        raise ModelError(
            f"engine.kv_tokens: the KV cache of {model.name} needs {need / 2**30:.1f} GiB, "
            f"{max(free, 0) / 2**30:.1f} GiB are free; lower kv_tokens"
        )
    return Decoder(
        model.config,
        model.weights,
        backend,
        KvPool(model.config, pages),
        max_rows=config.max_step_rows,
        max_logit_rows=config.max_step_rows,
        max_positions=positions + PAGE_SIZE,
    )


def _drafters(
    config: EngineConfig,
    target: LoadedModel,
    kernels: Kernels,
    pages: int,
    max_context: int,
    sampler: Sampler,
    progress: Progress | None,
) -> tuple[list[Drafter], str | None]:
    """The drafters named, in order, and the name of the draft model when one was loaded."""
    drafters: list[Drafter] = []
    draft_name: str | None = None

    def model_drafter() -> Drafter:
        nonlocal draft_name
        assert config.draft is not None  # the configuration checks it
        model = load_model(config.draft, dtype=config.dtype, cache_dir=config.cache_dir, progress=progress)
        draft_name = model.name
        promised = pages * KvPool.bytes_per_page(target.config) + config.max_step_rows * target.config.vocab_size * 4
        same = target.tokenizer.fingerprint == model.tokenizer.fingerprint
        # Its tokens may be more than the target's for the same text, but a model reads no further than it was taught.
        positions = max_context if same else min(max_context * 3 // 2, model.config.max_context)
        decoder = _decoder(config, model, kernels.backend(), pages, positions, promised)
        if same:
            return ModelDrafter(decoder, sampler)
        return CrossVocabularyDrafter(
            decoder, sampler, target.tokenizer, model.tokenizer, target.config.vocab_size, config.max_batch
        )

    makers: dict[str, Callable[[], Drafter]] = {
        "suffix": lambda: SuffixDrafter(config.speculation),
        "model": model_drafter,
    }
    if not config.speculation.enabled:
        return drafters, draft_name
    for name in config.drafters:
        if name == "none":
            continue
        if name not in makers:
            known = ", ".join(["none", *makers])
            raise ConfigError(f"engine.speculation.drafters: unknown drafter {name!r}; known: {known}")
        drafters.append(makers[name]())
    return drafters, draft_name
