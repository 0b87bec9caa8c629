"""The head as a torch module, for training: the equations of `draft.head.HeadNetwork`, unrolled on its own outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec.models.config import ModelConfig
from specdec.models.decoder import rope_tables
from specdec.training.trainer import Batch, Student

STEPS = 3  # of the unrolled loss
STEP_WEIGHT = 0.8  # of each step's loss over that of the step before: a token counts if those before it are accepted


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class _Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            _linear(2 * c.hidden_size, width) for width in (c.q_size, c.kv_size, c.kv_size)
        )
        self.o_proj = _linear(c.q_size, c.hidden_size)


class _Mlp(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (_linear(c.hidden_size, c.intermediate_size) for _ in range(2))
        self.down_proj = _linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.RMSNorm(c.hidden_size, c.norm_eps) for _ in range(3)
        )
        self.self_attn = _Attention(c)
        self.mlp = _Mlp(c)


class HeadModule(Student):
    """A head of one layer. Its parameters have EAGLE-3's names.

    config: of the layer, as `draft.head_checkpoint.HeadConfig.model`. embed: [vocab, hidden], the target's.
    features: columns of the target's features. draft_vocab: rows of the output table. positions: of a text, at most.

    ``feature_scale`` [features] is a constant factor of the features, which `published` moves into ``fc``: the columns
    have very unequal sizes.
    """

    embed: Tensor
    feature_scale: Tensor
    _cos: Tensor
    _sin: Tensor

    def __init__(self, config: ModelConfig, embed: Tensor, features: int, draft_vocab: int, positions: int) -> None:
        super().__init__()
        self.config = config
        self.fc = _linear(features, config.hidden_size)
        self.midlayer = _Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = _linear(config.hidden_size, draft_vocab)
        self.register_buffer("embed", embed, persistent=False)
        self.register_buffer("feature_scale", torch.ones(features))
        cos, sin = rope_tables(config.rope, config.head_dim, positions, local=False)
        self.register_buffer("_cos", cos, persistent=False)
        self.register_buffer("_sin", sin, persistent=False)

    def loss(self, batch: Batch) -> Tensor:
        """A mean over slots, summed over the steps by their weights."""
        total = batch.chances.new_zeros(())
        for step, state in enumerate(self._states(batch, STEPS)):
            valid = batch.valid(step)
            ids, chances = (part.roll(-step, 1)[valid] for part in (batch.ids, batch.chances))
            logprobs = torch.log_softmax(self.lm_head(state[valid]).float(), -1)
            total = total - STEP_WEIGHT**step * (chances * logprobs.gather(1, ids.clamp(min=0))).sum() / len(ids)
        return total

    def hits(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        for step, state in enumerate(self._states(batch, steps)):
            yield self.lm_head(state).argmax(-1) == batch.ids[..., 0].roll(-step, 1)

    def _states(self, batch: Batch, steps: int) -> list[Tensor]:
        return self.unroll(batch.features, functional.embedding(batch.following, self.embed).float(), steps)

    def unroll(self, features: Tensor, embedded: Tensor, steps: int) -> list[Tensor]:
        """RMS(z) [texts, slots, hidden] of each step: what ``lm_head`` takes.

        Step 0 is the committed slot i, which holds token i's features and the embedding of token i + 1. Step k is the
        slot of a drafted chain at position i + k: it holds the z of step k - 1 and the embedding of token i + 1 + k,
        and attends to the committed slots up to i and to the chain's own. The last k slots of step k have no token, and
        their rows mean nothing.

        features: [texts, slots, features]. embedded: [texts, slots, hidden], of the token after each slot.
        """
        x = self.fc(features * self.feature_scale)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        out = []
        for step in range(steps):
            y = x + self._attend(x, embedded.roll(-step, 1), step, keys, values)
            x = y + self.midlayer.mlp(self.midlayer.post_attention_layernorm(y))
            out.append(self.norm(x))
        return out

    def _attend(self, x: Tensor, embedded: Tensor, step: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Appends the step's keys and values, [texts, heads, slots, head_dim]."""
        c, layer, attention = self.config, self.midlayer, self.midlayer.self_attn
        pair = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(x)), -1)
        texts, slots, _ = pair.shape
        q = self._rotate(attention.q_proj(pair).view(texts, slots, c.n_heads, c.head_dim), step)
        key = self._rotate(attention.k_proj(pair).view(texts, slots, c.n_kv_heads, c.head_dim), step)
        value = attention.v_proj(pair).view(texts, slots, c.n_kv_heads, c.head_dim)
        shared = c.n_heads // c.n_kv_heads
        keys.append(key.repeat_interleave(shared, 2).transpose(1, 2))
        values.append(value.repeat_interleave(shared, 2).transpose(1, 2))
        q = q.transpose(1, 2).to(keys[0].dtype)
        if step == 0:
            mixed = functional.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True, scale=c.attn_scale)
        else:
            later = torch.ones(slots, slots, dtype=torch.bool, device=q.device).triu(1)
            scores = (q @ keys[0].transpose(2, 3)).float().masked_fill(later, -math.inf)
            own = [(q * k).sum(-1, keepdim=True).float() for k in keys[1:]]
            shares = torch.softmax(torch.cat((scores, *own), -1) * c.attn_scale, -1).to(q.dtype)
            mixed = shares[..., :slots] @ values[0]
            for at, v in enumerate(values[1:]):
                mixed = mixed + shares[..., slots + at, None] * v
        out: Tensor = attention.o_proj(mixed.transpose(1, 2).reshape(texts, slots, c.q_size))
        return out

    def _rotate(self, x: Tensor, step: int) -> Tensor:
        """Rotary positions ``step`` and on, by pairs (j, j + head_dim / 2); x [texts, slots, heads, head_dim]."""
        slots, half = x.shape[1], x.shape[3] // 2
        cos, sin = (table[step : step + slots, None].to(x.dtype) for table in (self._cos, self._sin))
        low, high = x[..., :half], x[..., half:]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def published(self) -> dict[str, Tensor]:
        """The parameters by EAGLE-3's names, float32 in CPU memory."""
        tensors = {name: value.detach().float().cpu().contiguous() for name, value in self.named_parameters()}
        tensors["fc.weight"] = tensors["fc.weight"] * self.feature_scale.cpu()
        return tensors
