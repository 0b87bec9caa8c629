"""Builds an engine from its configuration: kernels, weights, caches, drafters."""

from __future__ import annotations

import os

import torch

import specdec
from specdec.config import EngineConfig
from specdec.engine.build_decoder import build_decoder
from specdec.engine.build_drafters import DrafterBuilder, read_head
from specdec.engine.context_limit import context_limit
from specdec.engine.engine import Engine, EngineParts
from specdec.engine.plan_memory import plan_memory, tell_memory
from specdec.engine.profile_costs import costs_at_start
from specdec.engine.target_device import target_device
from specdec.errors import ConfigError
from specdec.kv_cache import KvCacheManager
from specdec.models import Progress, load_model
from specdec.sampling import Sampler
from specdec.types import EngineInfo
from verify_kernels.forward_batch import PAGE_SIZE
from verify_kernels.kernels import load_kernels
from verify_kernels.self_test import self_test


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
    device = target_device(config)
    if device is not None:
        from specdec.engine.build_device import build_device_parts  # imports triton, which a CPU machine may lack

        return build_device_parts(config, device, kernels, threads, progress)
    mode = self_test(kernels.backend(), config.dtype)
    if config.strict and mode != "bitwise":
        raise ConfigError(f"engine.strict: {kernels.name} kernels are {mode} here; drop strict or change engine.dtype")
    tell_memory(plan_memory(config, progress))
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
    costs = costs_at_start(config.speculation, decoder, drafters)
    return EngineParts(config, info, target.tokenizer, decoder, sampler, kv, drafters, costs, builder.model)
