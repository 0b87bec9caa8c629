"""EAGLE-3's equations (Li et al., arXiv 2503.01840) in plain torch, one slot at a time: the oracle of the head."""

from __future__ import annotations

from dataclasses import dataclass

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
    """By layer the key and value [kv_heads, head_dim] of one slot, and its output."""

    kv: list[tuple[Tensor, Tensor]]
    z: Tensor
    logits: Tensor


@dataclass
class Eagle3Reference:
    """``tensors``: a checkpoint's, in EAGLE's names; further layers are ``layers.1.`` and so on. ``residual_normed``:
    the variant with norm_before_residual. ``output_normed``: EAGLE-3.1's, with norm_output."""

    tensors: dict[str, Tensor]
    residual_normed: bool = False
    output_normed: bool = False

    def linear(self, name: str, x: Tensor) -> Tensor:
        out = self.tensors[name + ".weight"] @ x
        return out + self.tensors[name + ".bias"] if name + ".bias" in self.tensors else out

    def rms(self, name: str, x: Tensor) -> Tensor:
        return rms(x, self.tensors[name + ".weight"])

    def fuse(self, features: Tensor) -> Tensor:
        if "input_norm.weight" in self.tensors:
            features = self.rms("input_norm", features)
        if "fc_norm.0.weight" in self.tensors:
            features = torch.cat([self.rms(f"fc_norm.{at}", part) for at, part in enumerate(features.chunk(3))])
        return self.linear("fc", features)

    def slot(self, x: Tensor, next_token: int, position: int, seen: list[Slot]) -> Slot:
        """One slot that attends to ``seen`` and itself."""
        embedded = self.rms("midlayer.input_layernorm", self.tensors["embed_tokens.weight"][next_token])
        normed = self.rms("midlayer.hidden_norm", x)
        residual, inner = normed if self.residual_normed else x, torch.cat((embedded, normed))
        kv: list[tuple[Tensor, Tensor]] = []
        layer = "midlayer."
        while layer + "mlp.up_proj.weight" in self.tensors:
            before = [slot.kv[len(kv)] for slot in seen]
            attended, own = self.attention(layer + "self_attn.", inner, position, before)
            kv.append(own)
            y = residual + attended
            wide = self.rms(layer + "post_attention_layernorm", y)
            gated = torch.nn.functional.silu(self.linear(layer + "mlp.gate_proj", wide))
            residual = y + self.linear(layer + "mlp.down_proj", gated * self.linear(layer + "mlp.up_proj", wide))
            layer = f"layers.{len(kv)}."
            if layer + "input_layernorm.weight" in self.tensors:
                inner = self.rms(layer + "input_layernorm", residual)
        out = self.rms("norm", residual)
        return Slot(kv, out if self.output_normed else residual, self.linear("lm_head", out))

    def attention(
        self, name: str, x: Tensor, position: int, before: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The output, and the slot's key and value."""
        q = self.linear(name + "q_proj", x).view(HEADS, HEAD_DIM)
        key = self.linear(name + "k_proj", x).view(KV_HEADS, HEAD_DIM)
        if name + "q_norm.weight" in self.tensors:
            q = torch.stack([self.rms(name + "q_norm", head) for head in q])
            key = torch.stack([self.rms(name + "k_norm", head) for head in key])
        q, own = rope(q, position), (rope(key, position), self.linear(name + "v_proj", x).view(KV_HEADS, HEAD_DIM))
        keys, values = (torch.stack(part) for part in zip(*before, own, strict=True))
        heads = []
        for head in range(HEADS):
            shared = head * KV_HEADS // HEADS
            weights = torch.softmax(keys[:, shared] @ q[head] / HEAD_DIM**0.5, 0)
            heads.append(weights @ values[:, shared])
        return self.linear(name + "o_proj", torch.cat(heads)), own

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
