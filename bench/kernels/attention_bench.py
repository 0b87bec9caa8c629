"""Tree attention: time and share of the memory's bandwidth, by shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.kernels.attention_case import TILE, AttentionCase
from bench.kernels.kernel_timer import KernelTimer
from verify_kernels.forward_batch import BatchEntry, ForwardBatch
from verify_kernels.gpu.attention_plan import attention_plan
from verify_kernels.gpu.attention_workspace import AttentionWorkspace
from verify_kernels.gpu.tree_attention import tree_attention


def attention_figures(case: AttentionCase, timer: KernelTimer, device: torch.device, peak: float) -> dict[str, Any]:
    """Microseconds of one layer and of the step's plan, bytes that must move, and their share of ``peak`` bytes/s."""
    attend, plan = _bind(case, device)
    plan()
    took = timer.microseconds(attend)
    return {
        "name": case.name,
        "us": took,
        "plan_us": timer.microseconds(plan),
        "least_bytes": case.least_bytes,
        "bandwidth_share": case.least_bytes / (took * 1e-6) / peak,
    }


def binary_tree(nodes: int) -> list[int]:
    """Parents of a complete binary tree, in order of depth."""
    return [-1, *((node - 1) // 2 for node in range(1, nodes))]


def _bind(case: AttentionCase, device: torch.device) -> tuple[Callable[[], None], Callable[[], None]]:
    generator = torch.Generator(device=device).manual_seed(1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # which the interpreter gets right
    each = -(-(case.context + case.nodes) // TILE)
    order = torch.randperm(case.batch * each, generator=torch.Generator().manual_seed(2)).tolist()
    parents = binary_tree(case.nodes)
    batch = ForwardBatch.build(
        [
            BatchEntry([0] * case.nodes, parents, case.context, order[i * each : (i + 1) * each])
            for i in range(case.batch)
        ]
    )
    rows = batch.rows

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    keys, values = (random(case.batch * each, case.kv_heads, TILE, case.head_dim) for _ in range(2))
    q, out = random(rows, case.heads, case.head_dim), random(rows, case.heads, case.head_dim)
    step = {
        name: torch.from_numpy(getattr(batch, name).copy()).to(device)
        for name in ("entry_of", "entry_start", "entry_ctx", "depth", "page_table", "parent")
    }
    workspace = AttentionWorkspace.allocate(
        heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, kv_dtype=dtype, max_rows=rows,
        max_entries=case.batch, max_pages=each, device=device,
    )  # fmt: skip

    def plan() -> None:
        attention_plan(step["entry_start"], step["entry_ctx"], step["parent"], step["depth"], workspace)

    def attend() -> None:
        tree_attention(
            q, keys, values, out, workspace, entry_of=step["entry_of"], entry_start=step["entry_start"],
            entry_ctx=step["entry_ctx"], depth=step["depth"], page_table=step["page_table"],
            scale=case.head_dim**-0.5, window=case.window,
        )  # fmt: skip

    return attend, plan
