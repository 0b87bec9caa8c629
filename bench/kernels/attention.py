"""Times tree attention by shape, with FlashInfer for comparison, as a share of memory bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from bench.kernels.timer import KernelTimer
from verify_kernels.forward_batch import BatchEntry, ForwardBatch
from verify_kernels.gpu.attention_plan import attention_plan
from verify_kernels.gpu.attention_workspace import AttentionWorkspace
from verify_kernels.gpu.kernel_launch import StepRows
from verify_kernels.gpu.tree_attention import tree_attention

TILE = 64


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """``batch`` sequences of ``context`` cached tokens, each with a tree of ``nodes`` nodes, in bf16."""

    batch: int
    context: int
    nodes: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    window: int = 0

    @property
    def name(self) -> str:
        """The name in the report."""
        window = f" window {self.window}" if self.window else ""
        return f"b{self.batch} ctx{self.context} nodes{self.nodes} kv{self.kv_heads}x{self.head_dim}{window}"

    @property
    def least_bytes(self) -> int:
        """Bytes that must move: every key and value once, queries and results."""
        keys = min(self.context, self.window) if self.window else self.context
        kv = 2 * self.batch * self.kv_heads * (keys + self.nodes) * self.head_dim * 2
        return kv + 2 * self.batch * self.nodes * self.heads * self.head_dim * 2


CASES = (
    *(AttentionCase(1, context, nodes) for context in (4096, 32768) for nodes in (1, 16, 64)),
    *(AttentionCase(8, context, nodes) for context in (4096, 16384) for nodes in (1, 16)),
    *(AttentionCase(32, 4096, nodes) for nodes in (1, 16)),
    AttentionCase(8, 4096, 16, heads=28, kv_heads=4),
    AttentionCase(8, 8192, 16, heads=16, kv_heads=8, head_dim=256),
    AttentionCase(8, 16384, 16, window=4096),
)
# Cases for comparison with other libraries
COMPARED = (*(AttentionCase(batch, 4096, 16) for batch in (1, 2, 4, 8)), AttentionCase(1, 32768, 16))


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """The inputs and outputs of one case."""

    case: AttentionCase
    parents: list[int]  # the tree of every sequence
    q: Tensor  # [batch * nodes, heads, head_dim]
    keys: Tensor  # [pages, kv_heads, 64, head_dim]
    values: Tensor  # [pages, kv_heads, 64, head_dim]
    out: Tensor  # [batch * nodes, heads, head_dim]
    step: StepRows
    workspace: AttentionWorkspace

    @staticmethod
    def of(case: AttentionCase, device: torch.device) -> AttentionWork:
        """Random queries, keys and values, in pages in random order."""
        generator = torch.Generator(device=device).manual_seed(1)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter rounds bfloat16 wrongly
        each = -(-(case.context + case.nodes) // TILE)
        order = torch.randperm(case.batch * each, generator=torch.Generator().manual_seed(2)).tolist()
        parents = binary_tree(case.nodes)
        pages = [order[i * each : (i + 1) * each] for i in range(case.batch)]
        batch = ForwardBatch.build([BatchEntry([0] * case.nodes, parents, case.context, own) for own in pages])
        rows = batch.rows

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

        keys, values = (random(case.batch * each, case.kv_heads, TILE, case.head_dim) for _ in range(2))
        names = [field.name for field in fields(StepRows)]
        step = StepRows(**{name: torch.from_numpy(getattr(batch, name).copy()).to(device) for name in names})
        workspace = AttentionWorkspace.allocate(
            heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, kv_dtype=dtype, max_rows=rows,
            max_entries=case.batch, max_pages=each, device=device,
        )  # fmt: skip
        q, out = random(rows, case.heads, case.head_dim), random(rows, case.heads, case.head_dim)
        return AttentionWork(case, parents, q, keys, values, out, step, workspace)

    def plan(self) -> None:
        """Run what a step computes once for all layers."""
        attention_plan(self.step, self.workspace)

    def attend(self) -> None:
        """Run one layer, into ``out``."""
        case = self.case
        tree_attention(
            self.q, self.keys, self.values, self.out, self.step, self.workspace, scale=case.head_dim**-0.5,
            window=case.window,
        )  # fmt: skip

    def ancestors(self) -> Tensor:
        """bool [nodes, nodes]: whether the second is the first or its ancestor."""
        found = torch.eye(self.case.nodes, dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                found[node] |= found[parent]
        return found.to(self.q.device)


def binary_tree(nodes: int) -> list[int]:
    """Parents of a complete binary tree, in order of depth."""
    return [-1, *((node - 1) // 2 for node in range(1, nodes))]


def attention_figures(case: AttentionCase, timer: KernelTimer, device: torch.device, peak: float) -> dict[str, Any]:
    """Microseconds of one layer and of the plan, bytes that must move, and their share of ``peak`` bytes/s."""
    work = AttentionWork.of(case, device)
    plan_us = timer.microseconds(work.plan)  # ends with the plan complete, which attention reads before it waits
    took = timer.microseconds(work.attend)
    return {
        "name": case.name,
        "us": took,
        "plan_us": plan_us,
        "least_bytes": case.least_bytes,
        "bandwidth_share": case.least_bytes / (took * 1e-6) / peak,
    }


WORKSPACE_BYTES = 256 << 20


def flashinfer_rival(work: AttentionWork) -> Callable[[], Tensor]:
    """FlashInfer on the same pages; returns [batch * nodes, heads, head_dim].

    Raises:
        ImportError: the library is not installed.
        ValueError: the case has a window.
    """
    case, device = work.case, work.q.device
    if case.window:
        raise ValueError("windows are not compared")
    library = import_module("flashinfer")
    each = work.step.page_table.shape[1]

    def starts(size: int) -> Tensor:
        return torch.arange(0, (case.batch + 1) * size, size, dtype=torch.int32, device=device)

    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device), "HND"
    )
    seen = torch.ones(case.nodes, case.context, dtype=torch.bool, device=device)
    mask = torch.cat([seen, work.ancestors()], dim=1).flatten().repeat(case.batch)
    last = (case.context + case.nodes - 1) % TILE + 1
    wrapper.plan(
        starts(case.nodes), starts(each), work.step.page_table.flatten(),
        torch.full((case.batch,), last, dtype=torch.int32, device=device),
        case.heads, case.kv_heads, case.head_dim, TILE,
        custom_mask=mask, sm_scale=case.head_dim**-0.5, q_data_type=work.q.dtype,
    )  # fmt: skip
    out = torch.empty_like(work.q)

    def run() -> Tensor:
        wrapper.run(work.q, (work.keys, work.values), out=out)
        return out

    return run


MOST_ERROR = 2e-2  # largest difference of 16-bit results, relative to the norm


def rival_figures(case: AttentionCase, timer: KernelTimer, device: torch.device) -> dict[str, Any]:
    """Microseconds of our layer and of FlashInfer's, their ratio, and the relative difference of the results.

    If it is not installed, fails or computes another result, `flashinfer_skipped` says so.
    """
    work = AttentionWork.of(case, device)
    timer.microseconds(work.plan)  # ends with the plan complete
    ours = timer.microseconds(work.attend)
    found: dict[str, Any] = {"name": case.name, "us": ours}
    try:
        run = flashinfer_rival(work)
        theirs = run().reshape(work.out.shape).float()
        error = float(torch.linalg.norm(theirs - work.out.float()) / torch.linalg.norm(work.out.float()))
        if not error <= MOST_ERROR:
            raise ValueError(f"its results differ by {error:.3f}")
        took = timer.microseconds(run)
    except Exception as why:  # a failing rival does not stop the benchmark
        return found | {"flashinfer_skipped": f"{type(why).__name__}: {why}".splitlines()[0][:200]}
    return found | {"flashinfer_us": took, "flashinfer_over_ours": took / ours, "flashinfer_difference": error}
