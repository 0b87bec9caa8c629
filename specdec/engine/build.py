"""Builds an engine from its configuration: kernels, weights, caches, drafters."""

from __future__ import annotations

import os
from typing import cast

import torch

import specdec
from draft.protocol import CostlyDrafter
from specdec.config import EngineConfig
from specdec.engine.build_decoder import build_decoder
from specdec.engine.build_drafters import DrafterBuilder, read_head
from specdec.engine.engine import Engine, EngineParts
from specdec.engine.profile_costs import profile_costs
from specdec.errors import ConfigError
from specdec.kv_cache import KvCacheManager
from specdec.models import Progress, load_model
from specdec.models.model_config import ModelConfig
from specdec.sampling import Sampler
from specdec.types import EngineInfo
from verify_kernels.forward_batch import PAGE_SIZE
from verify_kernels.kernels import load_kernels
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
    head = read_head(config, target)
    taps = () if head is None else head.taps
    decoder = build_decoder(config, target, kernels.backend(), pages, max_context, taps=taps)
    sampler = Sampler(kernels.sampling, threads)
    builder = DrafterBuilder(config, target, kernels, sampler, pages, max_context, progress)
    drafters = builder.build(head)
    info = EngineInfo(
        target=target.name, draft=builder.draft_name, dtype=config.dtype, kernels=kernels.name, numeric_mode=mode,
        max_context=max_context, vocab_size=target.config.vocab_size, kv_tokens=pages * PAGE_SIZE,
        max_batch=config.max_batch, drafters=tuple(d.name for d in drafters), eos_ids=tuple(target.tokenizer.eos_ids),
        threads=threads, version=specdec.__version__,
    )  # fmt: skip
    if kernels.name == "native":
        # The kernels have their own workers; torch's, woken for a small copy, spin beside them for milliseconds.
        torch.set_num_threads(1)
    kv = KvCacheManager(pages, prefix_cache=config.prefix_cache)
    costs = None
    if config.speculation.enabled and drafters and config.speculation.profile_s > 0:
        costly = [cast(CostlyDrafter, drafter) for drafter in drafters if drafter.costly]
        costs = profile_costs(decoder, costly, config.speculation.profile_s)
    return EngineParts(config, info, target.tokenizer, decoder, sampler, kv, drafters, costs, builder.model)


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
