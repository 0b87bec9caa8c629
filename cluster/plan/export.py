"""Makes a profile of an engine: its limits, what its forwards cost here, and what a trace of its server tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

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
    parts: EngineParts,
    server: ServerConfig,
    machine: str,
    bytes_per_s: float,
    decisions: Path | None = None,
    captured: Path | None = None,
) -> Profile:
    """The profile of one replica: an engine of ``parts`` behind a server with configuration ``server``.

    machine: the processor's name. bytes_per_s: memory bandwidth; 0: unknown. decisions: decision trace of such a server
    under load; without it the profile has no drafts, and steps take only their forwards on an idle machine. captured:
    trace of the requests of the same time, for their time outside the engine.

    Raises:
        ConfigError: a trace cannot be used.
    """
    limits = limits_of(parts.config, parts.info, server)
    memory = _memory(parts, bytes_per_s)
    about = {"target": parts.info.target, "machine": machine, "limits": limits, "memory": memory}
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
    """``profile`` with ``request_ms`` milliseconds per request outside the engine."""
    return profile.model_copy(update={"overheads": profile.overheads.model_copy(update={"request_ms": request_ms})})


def limits_of(config: EngineConfig, info: EngineInfo, server: ServerConfig) -> ReplicaLimits:
    """The limits in force."""
    return ReplicaLimits(
        max_batch=config.max_batch, max_step_rows=config.max_step_rows, prefill_chunk=config.prefill_chunk,
        max_context=info.max_context, kv_tokens=info.kv_tokens, max_queued_requests=config.max_queued_requests,
        target_tpot_ms=config.target_tpot_ms, prefix_cache=config.prefix_cache,
        max_queued_tokens=server.max_queued_tokens, shed_late=server.shed_late,
    )  # fmt: skip


def _measured(parts: EngineParts) -> dict[str, Any]:
    """The engine's initial costs; measured if it has none."""
    if parts.costs is not None:
        return parts.costs.verify
    drafters = [cast(ModelBasedDrafter, drafter) for drafter in parts.drafters if drafter.model_based]
    return profile_costs(parts.decoder, drafters, PROFILE_S).verify


def _memory(parts: EngineParts, bytes_per_s: float) -> Memory:
    config, info, shape = parts.config, parts.info, parts.decoder.config
    kv_token_bytes = KvTensors.token_bytes(shape.n_layers, shape.n_kv_heads, shape.head_dim, _KV_DTYPES[info.kv_dtype])
    if info.kernels == "triton":
        return Memory(weight_bytes=info.weight_bytes, kv_token_bytes=kv_token_bytes, bytes_per_s=bytes_per_s)
    read = measure_model(config.target, dtype=config.dtype, cache_dir=config.cache_dir).read_bytes
    return Memory(weight_bytes=read, kv_token_bytes=kv_token_bytes, bytes_per_s=bytes_per_s)
