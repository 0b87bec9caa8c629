"""What a decoder and its sampler will take of a GPU's memory besides the model's weights, before any of it is taken."""

from __future__ import annotations

import torch

from specdec.engine.memory_need import MemoryNeed
from specdec.models.device.device_model import DeviceModel
from specdec.models.device.device_pool import DevicePool
from verify_kernels.forward_batch import PAGE_SIZE
from verify_kernels.gpu.attention_workspace import AttentionWorkspace
from verify_kernels.gpu.sampling_plan import SamplingPlan
from verify_kernels.gpu.sampling_workspace import SamplingWorkspace

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
    """Of what `specdec.models.device.device_decoder.DeviceDecoder` and the verifier allocate for these sizes, all that
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
