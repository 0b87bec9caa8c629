"""Runs an EAGLE-3 feature head on the kernels."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from draft.head_model import HeadModel
from specdec.models.kv_pool import KvPool
from specdec.models.rope import rope_tables
from verify_kernels.attention_spec import AttentionSpec
from verify_kernels.backend import Backend
from verify_kernels.forward_batch import ForwardBatch
from verify_kernels.linear_spec import LinearSpec, Prologue
from verify_kernels.packed_linear import PackedLinear
from verify_kernels.reference_backend import rms_norm

MAX_LOGIT_ROWS = 64  # rows that are expanded in one forward: what a whole tree can hold
_NO_TOKEN_HERE = -1e31  # dead to the sampler, which takes what is not above -1e30 for masked


class HeadNetwork:
    """The one layer of a head over a `ForwardBatch` (Li et al., arXiv 2503.01840).

    Slot i of a sequence holds the pair of token i's hidden state x_i (`fuse` of the target's features, or for a
    drafted token the z of the slot before) and the embedding of token i + 1; it predicts token i + 2:

        e = RMS(embed(token i + 1)), g = RMS(x_i), y = x_i + attention([e; g]), z = y + MLP(RMS(y)),
        logits = lm_head(RMS(z))

    KV of a slot is a function of its own pair and position alone. Results are views, valid until the next call.
    """

    def __init__(self, head: HeadModel, backend: Backend, pool: KvPool, *, max_rows: int, max_positions: int) -> None:
        c = head.config.model
        self.head, self.pool = head, pool
        self.max_rows, self.max_logit_rows = max_rows, min(max_rows, MAX_LOGIT_ROWS)
        self._backend, self._max_positions = backend, max_positions
        backend.reserve(max_rows, max(head.fc.k, 2 * c.hidden_size, c.intermediate_size, c.q_size), c.q_size)
        self._features = torch.zeros(max_rows, head.fc.k)
        self._fused, self._x, self._embedded = (torch.zeros(max_rows, c.hidden_size) for _ in range(3))
        self._pair = torch.zeros(max_rows, 2 * c.hidden_size)
        self._qkv = torch.zeros(max_rows, c.q_size + 2 * c.kv_size)
        self._attended = torch.zeros(max_rows, c.q_size)
        self._chosen = torch.zeros(self.max_logit_rows, c.q_size)
        self._z = torch.zeros(self.max_logit_rows, c.hidden_size)
        self._gate_up = torch.zeros(self.max_logit_rows, 2 * c.intermediate_size)
        self._draft_logits = torch.zeros(self.max_logit_rows, head.lm_head.n)
        self._logits = self._draft_logits
        if head.target_ids is not None:
            self._logits = torch.full((self.max_logit_rows, head.target_vocab), _NO_TOKEN_HERE)
        self._bind()

    def _bind(self) -> None:
        head, c, linear = self.head, self.head.config.model, self._backend.linear
        gate: Prologue = "silu" if c.activation == "silu" else "gelu"

        def normed(weight: PackedLinear, src: Tensor, dst: Tensor, norm: Tensor) -> LinearSpec:
            return LinearSpec(weight, src, dst, "rms", "store", norm, None, c.norm_eps)

        self._fc = linear(LinearSpec(head.fc, self._features, self._fused))
        self._to_qkv = linear(LinearSpec(head.qkv, self._pair, self._qkv))
        self._attention = self._backend.attention(self._attention_spec())
        self._o = linear(LinearSpec(head.o, self._chosen, self._z, "none", "add"))
        self._up = linear(normed(head.gate_up, self._z, self._gate_up, head.mlp_norm))
        self._down = linear(LinearSpec(head.down, self._gate_up, self._z, gate, "add"))
        self._lm_head = linear(normed(head.lm_head, self._z, self._draft_logits, head.final_norm))

    def _attention_spec(self) -> AttentionSpec:
        c = self.head.config.model
        cos, sin = rope_tables(c.rope, c.head_dim, self._max_positions, local=False)
        k_pool, v_pool = self.pool.layer(0)
        return AttentionSpec(
            n_heads=c.n_heads, n_kv_heads=c.n_kv_heads, head_dim=c.head_dim, scale=c.attn_scale, eps=c.norm_eps,
            window=0, q_norm=None, k_norm=None, cos=cos, sin=sin, qkv=self._qkv, out=self._attended,
            k_pool=k_pool, v_pool=v_pool,
        )  # fmt: skip

    @property
    def features_width(self) -> int:
        """Columns of the target's features."""
        return self.head.fc.k

    def fuse(self, features: Tensor) -> Tensor:
        """x float32 [n, hidden] of the target's features float32 [n, taps * target hidden], n at most ``max_rows``.

        Raises:
            ValueError: ``features`` has another width, or too many rows.
        """
        rows, width = features.shape
        if width != self._features.shape[1] or rows > self.max_rows:
            raise ValueError(f"features: [{rows}, {width}], the head takes [<= {self.max_rows}, {self.head.fc.k}]")
        self._features[:rows].copy_(features)
        self._fc(rows)
        return self._fused[:rows]

    def forward(self, batch: ForwardBatch, hidden: Tensor, chosen: Seq[int]) -> tuple[Tensor, Tensor]:
        """Write every row's KV; of the rows ``chosen``, logits float32 [n, target vocabulary] and z [n, hidden].

        batch.tokens: the *next* token of each slot. hidden: float32 [rows, hidden], the x of each slot.

        Raises:
            ValueError: more rows or positions than the buffers hold, or an id out of range.
        """
        self._check(batch, chosen)
        rows, h, eps = batch.rows, self._x.shape[1], self.head.config.model.norm_eps
        self._backend.embed(self.head.embed, batch.tokens, 1.0, self._embedded)
        self._pair[:rows, :h].copy_(rms_norm(self._embedded[:rows], self.head.embed_norm, eps))
        self._pair[:rows, h:].copy_(rms_norm(hidden, self.head.hidden_norm, eps))
        self._x[:rows].copy_(self._pair[:rows, h:] if self.head.config.residual_normed else hidden)
        self._to_qkv(rows)
        self._attention(batch)
        n = len(chosen)
        if n:
            index = np.asarray(chosen, np.int32)
            self._backend.gather_rows(self._attended, index, self._chosen)
            self._backend.gather_rows(self._x, index, self._z)
            for op in (self._o, self._up, self._down, self._lm_head):
                op(n)
            if self.head.target_ids is not None:
                self._logits[:n].index_copy_(1, self.head.target_ids, self._draft_logits[:n])
        return self._logits[:n], self._z[:n]

    def _check(self, batch: ForwardBatch, chosen: Seq[int]) -> None:
        if batch.rows > self.max_rows or len(chosen) > self.max_logit_rows:
            raise ValueError(
                f"batch: {batch.rows} rows, {len(chosen)} chosen; the buffers hold {self.max_rows}, "
                f"{self.max_logit_rows}"
            )
        if len(chosen) and not 0 <= min(chosen) <= max(chosen) < batch.rows:
            raise ValueError(f"chosen: must lie in [0, {batch.rows})")
        last = int((batch.entry_ctx[batch.entry_of] + batch.depth).max())
        if int(batch.entry_ctx.min()) < 0 or last >= self._max_positions:
            raise ValueError(f"batch: position {last}, the limit is {self._max_positions - 1}")
        if int(batch.tokens.min()) < 0 or int(batch.tokens.max()) >= self.head.embed.shape[0]:
            raise ValueError(f"tokens: ids must lie in [0, {self.head.embed.shape[0]})")
        if int(batch.page_table.min()) < 0 or int(batch.page_table.max()) >= self.pool.pages:
            raise ValueError(f"page_table: ids must lie in [0, {self.pool.pages})")
