"""FlashInfer's paged prefill with a custom mask, on the trees that tree attention is timed on."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from bench.kernels.attention_case import TILE
from bench.kernels.attention_work import AttentionWork

WORKSPACE_BYTES = 256 << 20


def flashinfer_rival(work: AttentionWork) -> Callable[[], Tensor]:
    """What computes [batch * nodes, heads, head_dim] from the very same pages.

    Raises:
        ImportError: the library is not there.
        ValueError: the case has a window, which is not compared.
    """
    case, device = work.case, work.q.device
    if case.window:
        raise ValueError("windows are not compared")
    library = import_module("flashinfer")
    each = work.step["page_table"].shape[1]

    def starts(size: int) -> Tensor:
        return torch.arange(0, (case.batch + 1) * size, size, dtype=torch.int32, device=device)

    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device), "HND"
    )
    seen = torch.ones(case.nodes, case.context, dtype=torch.bool, device=device)
    mask = torch.cat([seen, work.ancestors()], dim=1).flatten().repeat(case.batch)
    last = (case.context + case.nodes - 1) % TILE + 1
    wrapper.plan(
        starts(case.nodes), starts(each), work.step["page_table"].flatten(),
        torch.full((case.batch,), last, dtype=torch.int32, device=device),
        case.heads, case.kv_heads, case.head_dim, TILE,
        custom_mask=mask, sm_scale=case.head_dim**-0.5, q_data_type=work.q.dtype,
    )  # fmt: skip
    out = torch.empty_like(work.q)

    def run() -> Tensor:
        wrapper.run(work.q, (work.keys, work.values), out=out)
        return out

    return run
