"""Makes a profile of an engine: its limits, what its forwards cost here, and what a trace of its server tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

from bench.machine import BandwidthProbe, cpu_model
from cluster.plan.arrivals import read_requests
from cluster.plan.fit import captured_wait_ms, fit_request_ms, fit_steps
from cluster.plan.profile import Memory, Profile, ReplicaLimits
from cluster.plan.simulate import FleetPlan
from draft.protocol import ModelBasedDrafter
from specdec.config import EngineConfig, ServerConfig
from specdec.core.types import EngineInfo
from specdec.engine.engine import EngineParts
from specdec.engine.profile_costs import profile_costs
from specdec.models.memory import measure_model
from verify_kernels.backend import KvTensors

PROFILE_S = 3.0  # for measuring forwards where an engine does not do it itself
_KV_DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip


def export_profile(
    parts: EngineParts, server: ServerConfig, decisions: Path | None = None, captured: Path | None = None
) -> Profile:
    """Of an engine of ``parts`` behind a server of ``server``. decisions: the decision trace that such a server wrote
    under load; without it nothing is drafted, steps take nothing but their forwards, and these as long as they do
    while nothing else runs. captured: a trace of the requests of the same time, for what they take outside the engine.

    Raises:
        ConfigError: a trace can not be used.
    """
    limits = limits_of(parts.config, parts.info, server)
    memory = _memory(parts)
    about = {"target": parts.info.target, "machine": cpu_model(), "limits": limits, "memory": memory}
    if decisions is None:
        return Profile.model_validate(about | {"verify": _measured(parts)})
    fitted = fit_steps(decisions)
    profile = Profile.model_validate(
        about
        | {"verify": fitted.verify, "noise": fitted.noise, "drafted": fitted.drafted, "overheads": fitted.overheads}
    )
    if captured is None:
        return profile
    requests = read_requests(captured)
    return with_request_ms(profile, fit_request_ms(FleetPlan(profile, 1), requests, captured_wait_ms(requests)))


def with_request_ms(profile: Profile, request_ms: float) -> Profile:
    """``profile`` whose requests take so many milliseconds outside the engine."""
    return profile.model_copy(update={"overheads": profile.overheads.model_copy(update={"request_ms": request_ms})})


def limits_of(config: EngineConfig, info: EngineInfo, server: ServerConfig) -> ReplicaLimits:
    """Those in force."""
    return ReplicaLimits(
        max_batch=config.max_batch, max_step_rows=config.max_step_rows, prefill_chunk=config.prefill_chunk,
        max_context=info.max_context, kv_tokens=info.kv_tokens, max_queued_requests=config.max_queued_requests,
        target_tpot_ms=config.target_tpot_ms, prefix_cache=config.prefix_cache,
        max_queued_tokens=server.max_queued_tokens, shed_late=server.shed_late,
    )  # fmt: skip


def _measured(parts: EngineParts) -> dict[str, Any]:
    """What the engine would start with; measured where it would not."""
    if parts.costs is not None:
        return parts.costs.verify
    drafters = [cast(ModelBasedDrafter, drafter) for drafter in parts.drafters if drafter.model_based]
    return profile_costs(parts.decoder, drafters, PROFILE_S).verify


def _memory(parts: EngineParts) -> Memory:
    config, info, shape = parts.config, parts.info, parts.decoder.config
    kv_token_bytes = KvTensors.token_bytes(shape.n_layers, shape.n_kv_heads, shape.head_dim, _KV_DTYPES[info.kv_dtype])
    if info.kernels == "triton":
        from bench.kernels.timer import peak_bandwidth  # imports triton, which a CPU machine may lack

        bytes_per_s, _ = peak_bandwidth(torch.device("cuda", torch.cuda.current_device()))
        return Memory(weight_bytes=info.weight_bytes, kv_token_bytes=kv_token_bytes, bytes_per_s=bytes_per_s)
    read = measure_model(config.target, dtype=config.dtype, cache_dir=config.cache_dir).read_bytes
    bytes_per_s = BandwidthProbe(config.cache_dir, info.threads).median() if info.kernels == "native" else 0.0
    return Memory(weight_bytes=read, kv_token_bytes=kv_token_bytes, bytes_per_s=bytes_per_s)
