"""Builds an engine's parts with the models on a GPU. Imports triton, which a CPU machine may lack."""

from __future__ import annotations

import torch

import specdec
from specdec.config import EngineConfig
from specdec.engine.build import DrafterBuilder, context_limit, read_head
from specdec.engine.device_verify import DeviceVerifier, rehearse
from specdec.engine.engine import EngineParts
from specdec.engine.memory import MemoryNeed, plan_memory, tell_memory
from specdec.engine.profile_costs import costs_at_start
from specdec.errors import ConfigError, ModelError
from specdec.kv_cache import KvCacheManager
from specdec.models import Progress
from specdec.models.device_decoder import DeviceDecoder, DevicePool, device_self_test
from specdec.models.device_weights import DeviceModel, load_device_model
from specdec.sampling import Sampler
from specdec.tree import MAX_NODES
from specdec.types import EngineInfo
from verify_kernels.forward_batch import PAGE_SIZE
from verify_kernels.gpu.attention_workspace import AttentionWorkspace
from verify_kernels.gpu.kernel_launch import FP8
from verify_kernels.gpu.sampling_table import SamplingPlan, SamplingWorkspace
from verify_kernels.gpu.triton_sampling import TritonSampling
from verify_kernels.kernels import Kernels

_KV = ("engine.kv_tokens",)
_ROWS = ("engine.max_step_rows",)
_SAMPLES = ("engine.max_batch", "engine.max_step_rows")


def device_needs(
    model: DeviceModel,
    kv_dtype: torch.dtype,
    device: torch.device,
    *,
    pages: int,
    max_rows: int,
    max_logit_rows: int,
    max_positions: int,
    taps: int,
) -> list[MemoryNeed]:
    """Of what `specdec.models.device_decoder.DeviceDecoder` and the verifier allocate for these sizes, all that
    grows with them; what decides each is named."""
    c, name = model.config, model.name
    widths = (2 + taps) * c.hidden_size + 2 * (c.q_size + c.kv_size + c.intermediate_size)
    partials = AttentionWorkspace.partial_bytes(
        heads=c.n_heads, head_dim=c.head_dim, kv_dtype=kv_dtype, max_rows=max_rows,
        max_pages=-(-max_positions // PAGE_SIZE), device=device,
    )  # fmt: skip
    sampling = SamplingWorkspace.bytes_needed(max_logit_rows, SamplingPlan.of(c.vocab_size))
    rows = model.types.rows.itemsize * (max_rows * widths + max_logit_rows * c.hidden_size)
    logits = max_logit_rows * c.vocab_size * torch.float32.itemsize
    return [
        MemoryNeed(f"KV cache of {name}", pages * DevicePool.bytes_per_page(c, kv_dtype), _KV),
        MemoryNeed(f"attention's partial sums of {name}", partials, ("engine.max_context", *_ROWS)),
        MemoryNeed(f"rows of a step of {name}", rows, _ROWS),
        MemoryNeed(f"logits of {name}", logits, _SAMPLES),
        MemoryNeed(f"sampling for {name}", sampling, _SAMPLES),
    ]


GIB = 1 << 30
FP8_CAPABILITY = (8, 9)  # that converts to and from float8


def build_device_decoder(
    config: EngineConfig,
    model: DeviceModel,
    device: torch.device,
    pages: int,
    positions: int,
    taps: tuple[int, ...] = (),
) -> DeviceDecoder:
    """A decoder with a KV pool of ``pages`` pages, for sequences of up to ``positions`` tokens and room for a tree.

    Raises:
        ModelError: the device's memory is short.
        ConfigError: a float8 KV cache was asked for, which the device can not have.
    """
    kv_dtype = FP8 if config.kv_dtype == "fp8" else model.types.rows
    max_logit_rows = min(config.max_step_rows, config.max_batch * MAX_NODES)
    max_positions = positions + PAGE_SIZE
    if device.type == "cuda":
        if kv_dtype == FP8 and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            raise ConfigError("engine.kv_dtype: this GPU knows no fp8; set it to auto")
        needs = device_needs(
            model, kv_dtype, device, pages=pages, max_rows=config.max_step_rows, max_logit_rows=max_logit_rows,
            max_positions=max_positions, taps=len(taps),
        )  # fmt: skip
        _check_memory(needs, torch.cuda.mem_get_info(device)[0])
    return DeviceDecoder(
        model,
        pages,
        device,
        max_entries=config.max_batch,
        max_rows=config.max_step_rows,
        max_logit_rows=max_logit_rows,
        max_positions=max_positions,
        taps=taps,
        kv_dtype=kv_dtype,
    )


def _check_memory(needs: list[MemoryNeed], free: int) -> None:
    """ModelError where all of it is more than there is; it names what the largest part depends on."""
    together = sum(need.nbytes for need in needs)
    if together <= free:
        return
    ordered = sorted(needs, key=lambda need: -need.nbytes)
    most = ordered[0]
    others = ", ".join(f"{need.what} {need.nbytes / GIB:.1f}" for need in ordered[1:])
    raise ModelError(
        f"{most.options[0]}: {most.what} needs {most.nbytes / GIB:.1f} GiB of the device, and with {others} "
        f"it comes to {together / GIB:.1f} GiB; {free / GIB:.1f} GiB are free; "
        f"lower {' or '.join(option.removeprefix('engine.') for option in most.options)}"
    )


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
