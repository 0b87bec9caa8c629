"""FlexAttention on the trees that tree attention is timed on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.kernels.attention_work import AttentionWork


def flex_rival(work: AttentionWork) -> Callable[[], Tensor]:
    """What computes [batch, nodes, heads, head_dim]; compiled on a GPU. Keys and values lie side by side for it, which
    saves it the page table.

    Raises:
        ValueError: the case has a window, which is not compared.
    """
    case = work.case
    if case.window:
        raise ValueError("windows are not compared")
    context, keys_each = case.context, case.context + case.nodes
    ancestors = work.ancestors()

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key < context) | ancestors[row, (key - context).clamp(min=0)]

    on_gpu = work.q.is_cuda
    device = str(work.q.device)
    # Heads and sequences share the mask, as the trees are alike: that is the least it can read.
    mask = create_block_mask(sees, None, None, case.nodes, keys_each, device=device, _compile=on_gpu)
    q = work.q.view(case.batch, case.nodes, case.heads, case.head_dim).transpose(1, 2).contiguous()
    k, v = (_side_by_side(work, pool, keys_each) for pool in (work.keys, work.values))
    attend = torch.compile(flex_attention, dynamic=False) if on_gpu else flex_attention
    gqa = case.heads != case.kv_heads

    def run() -> Tensor:
        out: Tensor = attend(q, k, v, block_mask=mask, scale=case.head_dim**-0.5, enable_gqa=gqa)
        return out.transpose(1, 2)

    return run


def _side_by_side(work: AttentionWork, pool: Tensor, keys_each: int) -> Tensor:
    """[batch, kv_heads, keys, head_dim] of a paged pool."""
    pages = pool[work.step["page_table"].long()]  # [batch, pages, kv_heads, 64, head_dim]
    return pages.transpose(1, 2).flatten(2, 3)[:, :, :keys_each].contiguous()
