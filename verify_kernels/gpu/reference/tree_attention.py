"""Tree attention in plain torch, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from verify_kernels.gpu.attention_tiles import TILE
from verify_kernels.gpu.attention_workspace import AttentionWorkspace


def tree_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    out: Tensor,
    workspace: AttentionWorkspace,
    *,
    entry_of: Tensor,
    entry_start: Tensor,
    entry_ctx: Tensor,
    depth: Tensor,
    page_table: Tensor,
    scale: float,
    window: int = 0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """out = attention of every row to the keys of its own path; see `verify_kernels.gpu.tree_attention`."""
    group = workspace.group
    for row, entry in enumerate(entry_of.tolist()):
        if not 0 <= entry < entry_ctx.shape[0] or not entry_start[entry] <= row < entry_start[entry + 1]:
            continue
        slots = _slots(workspace, row, int(entry_start[entry]), int(entry_ctx[entry]), depth)
        if window:
            slots = slots[-window:]
        page, lane = page_table[entry][slots // TILE].long(), slots % TILE
        k, v = k_pool[page, :, lane].float(), v_pool[page, :, lane].float()  # [keys, kv_heads, head_dim]
        if k_scale is not None and v_scale is not None:
            k, v = k * k_scale[:, None], v * v_scale[:, None]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        weights = (torch.einsum("hd,jhd->hj", q[row].float(), k) * scale).softmax(-1)
        out[row] = torch.einsum("hj,jhd->hd", weights, v).to(out.dtype)


def _slots(workspace: AttentionWorkspace, row: int, start: int, ctx: int, depth: Tensor) -> Tensor:
    """Slots of a row's keys, by position."""
    own, leaf = int(depth[row]), start + int(workspace.leaf_of[row])
    node = torch.arange(own + 1, device=depth.device)
    back = (int(depth[leaf]) - node).clamp(0, workspace.max_branch - 1)
    node = torch.where(node < workspace.diverge[leaf], node, workspace.path[leaf][back])
    return torch.cat((torch.arange(ctx, device=depth.device), ctx + node)).long()
