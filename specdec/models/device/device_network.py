"""A decoder-only transformer on a GPU: which kernels a forward launches, on which memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.models.device.device_layer import DeviceLayer
from specdec.models.device.device_linear import Gate
from specdec.models.device.device_model import DeviceModel
from specdec.models.device.device_pool import DevicePool
from specdec.models.device.step_arrays import StepArrays
from specdec.models.device.step_tier import StepTier
from specdec.models.rope import rope_tables
from verify_kernels.gpu.attention_plan import attention_plan
from verify_kernels.gpu.attention_workspace import AttentionWorkspace
from verify_kernels.gpu.embed import embed
from verify_kernels.gpu.gather_rows import gather_rows
from verify_kernels.gpu.kv_ops import write_kv
from verify_kernels.gpu.norm import add_norm
from verify_kernels.gpu.tree_attention import tree_attention


class DeviceNetwork:
    """All memory is allocated here, for steps up to ``largest``; a forward allocates nothing and waits for nothing, so
    that it can be recorded. Rows do not depend on each other, nor on the tier.

    ``taps``: as `specdec.models.decoder.Decoder`'s; ``tapped`` is in the rows' type.
    """

    def __init__(
        self, model: DeviceModel, pool: DevicePool, largest: StepTier, max_positions: int, taps: Sequence[int] = ()
    ) -> None:
        self._config, self._weights, self._pool, self.taps = model.config, model.weights, pool, tuple(taps)
        c, device, rows = model.config, pool.k.device, largest.rows

        def floats(*shape: int, dtype: torch.dtype = model.types.rows) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._x, self._y = floats(rows, c.hidden_size), floats(rows, c.hidden_size)
        self._qkv, self._attended = floats(rows, c.q_size + 2 * c.kv_size), floats(rows, c.q_size)
        self._gate_up = floats(rows, 2 * c.intermediate_size)
        self._chosen = floats(largest.samples, c.hidden_size)
        self._logits = floats(largest.samples, c.vocab_size, dtype=torch.float32)
        self.tapped = floats(rows, len(self.taps) * c.hidden_size)
        self._gate: Gate = "silu" if c.activation == "silu" else "gelu"
        self._angles = [
            tuple(t.to(device) for t in rope_tables(c.rope, c.head_dim, max_positions, local=local))
            for local in (False, True)
        ]
        self._workspace = AttentionWorkspace.allocate(
            heads=c.n_heads, kv_heads=c.n_kv_heads, head_dim=c.head_dim, kv_dtype=pool.k.dtype, max_rows=rows,
            max_entries=largest.entries, max_pages=largest.pages, device=device,
        )  # fmt: skip

    def plan_coarsely(self, coarse: bool | None) -> None:
        """See `AttentionWorkspace.coarse`."""
        self._workspace = replace(self._workspace, coarse=coarse)

    def hidden(self, step: StepArrays) -> None:
        """Every row through all layers; writes its KV."""
        rows = step.tier.rows
        x = self._x[:rows]
        embed(self._weights.embed, step.tokens, self._config.embed_scale, x)
        attention_plan(step.entry_start, step.entry_ctx, step.parent, step.depth, self._workspace)
        for index, layer in enumerate(self._weights.layers):
            self._tap(index, x)
            self._attend(index, layer, x, step)
            gate_up = self._gate_up[:rows]
            layer.gate_up.normed(x, layer.mlp_norm, self._config.norm_eps, gate_up)
            if layer.mlp_post_norm is None:
                layer.down.gated(gate_up, self._gate, x, x)
            else:
                y = self._y[:rows]
                layer.down.gated(gate_up, self._gate, y, None)
                add_norm(x, eps=self._config.norm_eps, y=y, post_norm=layer.mlp_post_norm)

    def logits(self, step: StepArrays) -> Tensor:
        """Of the step's logit rows, once `hidden` is queued: float32 [samples, vocab], overwritten by the next call."""
        chosen, logits = self._chosen[: step.tier.samples], self._logits[: step.tier.samples]
        gather_rows(self._x[: step.tier.rows], step.logit_rows, chosen)
        self._weights.lm_head.normed(chosen, self._weights.final_norm, self._config.norm_eps, logits)
        return logits

    def logits_of(self, samples: int) -> Tensor:
        """The first of what `logits` computed last."""
        return self._logits[:samples]

    def _attend(self, index: int, layer: DeviceLayer, x: Tensor, step: StepArrays) -> None:
        c, rows = self._config, step.tier.rows
        sliding = bool(c.sliding_layers and c.sliding_layers[index])
        qkv, attended = self._qkv[:rows], self._attended[:rows]
        q = qkv.view(rows, -1, c.head_dim)[:, : c.n_heads]
        pools, (cos, sin) = self._pool.layer(index), self._angles[sliding]
        where = {
            "entry_of": step.entry_of, "entry_start": step.entry_start, "entry_ctx": step.entry_ctx,
            "depth": step.depth, "page_table": step.page_table, **self._pool.scales,
        }  # fmt: skip
        layer.qkv.normed(x, layer.attn_norm, c.norm_eps, qkv)
        write_kv(qkv, q, *pools, cos, sin, **where, eps=c.norm_eps, q_norm=layer.q_norm, k_norm=layer.k_norm)
        tree_attention(
            q, *pools, attended.view(rows, c.n_heads, c.head_dim), self._workspace, **where, scale=c.attn_scale,
            window=(c.sliding_window or 0) if sliding else 0,
        )  # fmt: skip
        if layer.attn_post_norm is None:
            layer.o.plain(attended, x, x)
        else:
            y = self._y[:rows]
            layer.o.plain(attended, y)
            add_norm(x, eps=c.norm_eps, y=y, post_norm=layer.attn_post_norm)

    def _tap(self, layer: int, x: Tensor) -> None:
        width = self._config.hidden_size
        for i, tap in enumerate(self.taps):
            if tap == layer:
                self.tapped[: x.shape[0], i * width : (i + 1) * width].copy_(x)
