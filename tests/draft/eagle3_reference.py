"""EAGLE-3's equations (Li et al., arXiv 2503.01840) in plain torch, one slot at a time: the oracle of the head."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.draft.eagle3_checkpoint import EPS, HEAD_DIM, HEADS, KV_HEADS, THETA


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + EPS) * weight


def rope(x: Tensor, position: int) -> Tensor:
    """Rotate the vectors x [heads, head_dim] by pairs (j, j + head_dim / 2)."""
    half = HEAD_DIM // 2
    angle = position * THETA ** (-torch.arange(half, dtype=torch.float64) * 2 / HEAD_DIM)
    turned = torch.view_as_complex(torch.stack((x[:, :half], x[:, half:]), -1).double().contiguous())
    turned = turned * torch.polar(torch.ones(half, dtype=torch.float64), angle)
    return torch.cat((turned.real, turned.imag), -1).float()


@dataclass
class Slot:
    """Key and value [kv_heads, head_dim] of one slot, and its output."""

    key: Tensor
    value: Tensor
    z: Tensor
    logits: Tensor


@dataclass
class Eagle3Reference:
    """``tensors``: a checkpoint's. ``residual_normed``: the variant with norm_before_residual."""

    tensors: dict[str, Tensor]
    residual_normed: bool = False
    slots: list[Slot] = field(default_factory=list)

    def linear(self, name: str, x: Tensor) -> Tensor:
        out = self.tensors[name + ".weight"] @ x
        return out + self.tensors[name + ".bias"] if name + ".bias" in self.tensors else out

    def fuse(self, features: Tensor) -> Tensor:
        return self.linear("fc", features)

    def slot(self, x: Tensor, next_token: int, position: int, seen: list[Slot]) -> Slot:
        """One slot that attends to ``seen`` and itself."""
        t, p, attention, mlp = self.tensors, "midlayer.", "midlayer.self_attn.", "midlayer.mlp."
        embedded = rms(t["embed_tokens.weight"][next_token], t[p + "input_layernorm.weight"])
        normed = rms(x, t[p + "hidden_norm.weight"])
        pair = torch.cat((embedded, normed))
        q = rope(self.linear(attention + "q_proj", pair).view(HEADS, HEAD_DIM), position)
        key = rope(self.linear(attention + "k_proj", pair).view(KV_HEADS, HEAD_DIM), position)
        value = self.linear(attention + "v_proj", pair).view(KV_HEADS, HEAD_DIM)
        keys = torch.stack([*(slot.key for slot in seen), key])
        values = torch.stack([*(slot.value for slot in seen), value])
        heads = []
        for head in range(HEADS):
            shared = head * KV_HEADS // HEADS
            weights = torch.softmax(keys[:, shared] @ q[head] / HEAD_DIM**0.5, 0)
            heads.append(weights @ values[:, shared])
        y = (normed if self.residual_normed else x) + self.linear(attention + "o_proj", torch.cat(heads))
        inner = rms(y, t[p + "post_attention_layernorm.weight"])
        gated = torch.nn.functional.silu(self.linear(mlp + "gate_proj", inner)) * self.linear(mlp + "up_proj", inner)
        z = y + self.linear(mlp + "down_proj", gated)
        return Slot(key, value, z, self.linear("lm_head", rms(z, t["norm.weight"])))

    def committed(self, tokens: list[int], features: Tensor) -> list[Slot]:
        """Slots 0 to len(tokens) - 2, given the features [>= len(tokens) - 1, 3 h] of each position."""
        slots: list[Slot] = []
        for i in range(len(tokens) - 1):
            slots.append(self.slot(self.fuse(features[i]), tokens[i + 1], i, slots))
        return slots

    def tree(self, slots: list[Slot], tokens: list[int], parents: list[int]) -> list[Slot]:
        """Slots of a tree's nodes; node 0 is the last of ``slots``, the others hold drafted tokens."""
        nodes, paths = [slots[-1]], [list(slots)]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            before = paths[parent]
            node = self.slot(nodes[parent].z, token, len(before), before)
            nodes.append(node)
            paths.append([*before, node])
        return nodes
