"""Tree attention of one shape on random keys, bound and ready to be timed, and what its rivals are given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.kernels.attention_case import TILE, AttentionCase
from verify_kernels.forward_batch import BatchEntry, ForwardBatch
from verify_kernels.gpu.attention_plan import attention_plan
from verify_kernels.gpu.attention_workspace import AttentionWorkspace
from verify_kernels.gpu.tree_attention import tree_attention


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """q, out: [batch * nodes, heads, head_dim]; keys, values: [pages, kv_heads, 64, head_dim]; step: the step's arrays
    by name, see `tree_attention`. All sequences have the tree of ``parents``."""

    case: AttentionCase
    parents: list[int]
    q: Tensor
    keys: Tensor
    values: Tensor
    out: Tensor
    step: dict[str, Tensor]
    workspace: AttentionWorkspace

    @staticmethod
    def of(case: AttentionCase, device: torch.device) -> AttentionWork:
        """Random queries, keys and values, in pages that lie in no order."""
        generator = torch.Generator(device=device).manual_seed(1)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # which the interpreter gets right
        each = -(-(case.context + case.nodes) // TILE)
        order = torch.randperm(case.batch * each, generator=torch.Generator().manual_seed(2)).tolist()
        parents = binary_tree(case.nodes)
        pages = [order[i * each : (i + 1) * each] for i in range(case.batch)]
        batch = ForwardBatch.build([BatchEntry([0] * case.nodes, parents, case.context, own) for own in pages])
        rows = batch.rows

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

        keys, values = (random(case.batch * each, case.kv_heads, TILE, case.head_dim) for _ in range(2))
        names = ("entry_of", "entry_start", "entry_ctx", "depth", "page_table", "parent")
        step = {name: torch.from_numpy(getattr(batch, name).copy()).to(device) for name in names}
        workspace = AttentionWorkspace.allocate(
            heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, kv_dtype=dtype, max_rows=rows,
            max_entries=case.batch, max_pages=each, device=device,
        )  # fmt: skip
        q, out = random(rows, case.heads, case.head_dim), random(rows, case.heads, case.head_dim)
        return AttentionWork(case, parents, q, keys, values, out, step, workspace)

    def plan(self) -> None:
        """What a step does once for all layers."""
        step = self.step
        attention_plan(step["entry_start"], step["entry_ctx"], step["parent"], step["depth"], self.workspace)

    def attend(self) -> None:
        """One layer, into ``out``."""
        step, case = self.step, self.case
        tree_attention(
            self.q, self.keys, self.values, self.out, self.workspace, entry_of=step["entry_of"],
            entry_start=step["entry_start"], entry_ctx=step["entry_ctx"], depth=step["depth"],
            page_table=step["page_table"], scale=case.head_dim**-0.5, window=case.window,
        )  # fmt: skip

    def ancestors(self) -> Tensor:
        """bool [nodes, nodes]: the second is the first or above it."""
        found = torch.eye(self.case.nodes, dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                found[node] |= found[parent]
        return found.to(self.q.device)


def binary_tree(nodes: int) -> list[int]:
    """Parents of a complete binary tree, in order of depth."""
    return [-1, *((node - 1) // 2 for node in range(1, nodes))]
