"""Builds an engine's parts with the models on a GPU."""

from __future__ import annotations

import torch

import specdec
from specdec.config import EngineConfig
from specdec.engine.build_device_decoder import build_device_decoder
from specdec.engine.build_drafters import DrafterBuilder, read_head
from specdec.engine.context_limit import context_limit
from specdec.engine.engine import EngineParts
from specdec.engine.plan_memory import plan_memory, tell_memory
from specdec.engine.profile_costs import costs_at_start
from specdec.errors import ConfigError
from specdec.kv_cache import KvCacheManager
from specdec.models import Progress
from specdec.models.device.device_self_test import device_self_test
from specdec.models.device.load_device_model import load_device_model
from specdec.sampling import Sampler
from specdec.step.device_rehearsal import rehearse
from specdec.step.device_verifier import DeviceVerifier
from specdec.types import EngineInfo
from verify_kernels.forward_batch import PAGE_SIZE
from verify_kernels.gpu.triton_sampling import TritonSampling
from verify_kernels.kernels import Kernels


def build_device_parts(
    config: EngineConfig, device: torch.device, kernels: Kernels, threads: int, progress: Progress | None = None
) -> EngineParts:
    """What `build_parts` assembles, with target and draft model on ``device``; a head runs on the CPU, by ``kernels``.

    Raises:
        ModelError: a model can not be had, or the device's memory is short.
        ConfigError: the parts do not fit each other, or ``strict`` is set and the numbers are not bitwise.
    """
    tell_memory(plan_memory(config, progress, on_device=True))
    target = load_device_model(
        config.target, dtype=config.device_dtype, cache_dir=config.cache_dir, device=device,
        max_rows=config.max_step_rows, progress=progress,
    )  # fmt: skip
    max_context = context_limit(config, target.config)
    pages = -(-max(config.kv_tokens, PAGE_SIZE) // PAGE_SIZE)
    head = read_head(config, target)
    decoder = build_device_decoder(config, target, device, pages, max_context, head.taps if head else ())
    mode = device_self_test(decoder)
    if config.strict and mode != "bitwise":
        raise ConfigError(f"engine.strict: triton's kernels are {mode} here; drop strict or set engine.device to cpu")
    sampler = Sampler(TritonSampling(device), threads)
    builder = DrafterBuilder(config, target, kernels, sampler, pages, max_context, progress, device)
    drafters = builder.build(head)
    info = EngineInfo(
        target=target.name, draft=builder.draft_name, dtype=target.dtype, kernels="triton", numeric_mode=mode,
        max_context=max_context, vocab_size=target.config.vocab_size, kv_tokens=pages * PAGE_SIZE,
        max_batch=config.max_batch, drafters=tuple(d.name for d in drafters), eos_ids=tuple(target.tokenizer.eos_ids),
        threads=threads, version=specdec.__version__,
    )  # fmt: skip
    kv = KvCacheManager(pages, prefix_cache=config.prefix_cache)
    costs = costs_at_start(config.speculation, decoder, drafters)
    verifier = DeviceVerifier(decoder)
    if device.type == "cuda":
        rehearse(verifier, decoder)
    return EngineParts(config, info, target.tokenizer, decoder, sampler, kv, drafters, costs, builder.model, verifier)
