"""A decoder-only transformer on the CPU as a list of bound kernels: built once, run per step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.weights import LayerWeights, ModelWeights
from verify_kernels.backend import (
    AttentionSpec,
    Backend,
    BoundLayers,
    Epilogue,
    ExpertsSpec,
    KvTensors,
    LayerSpec,
    LinearSpec,
)
from verify_kernels.forward_batch import PAGE_SIZE, ForwardBatch
from verify_kernels.packed_weights import HostLinear, PackedLinear

H = TypeVar("H", bound=HostLinear)


def rope_tables(rope: RopeConfig, head_dim: int, positions: int, *, local: bool) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [positions, head_dim / 2], computed in float64.

    local: for local layers, which in some families have a base of their own, or no rotary embedding: then cos
    is 1 and sin 0. Scaling applies to the global base only, as in Gemma 3. "llama3" scaling is the piecewise rule of
    Llama 3.1's release: long wavelengths are slowed by the factor, short ones kept, those between interpolated. "yarn"
    (Peng et al., arXiv 2309.00071) interpolates by index between the frequencies that turn beta_slow and beta_fast
    times in the original context. Channels that are not rotated have cos 1 and sin 0.
    """
    theta = rope.local_theta if local and rope.local_theta is not None else rope.theta
    rotated = rope.rotated or head_dim
    inverse = theta ** -(torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    magnitude = 1.0
    if local and not rope.local_rotates:
        inverse = torch.zeros_like(inverse)
    elif rope.scaling is not None and not (local and rope.local_theta is not None):
        inverse = _scaled(inverse, theta, rope.scaling)
        magnitude = float(rope.scaling[-1]) if rope.original_context else 1.0
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), inverse)
    cos, sin = torch.ones(positions, head_dim // 2), torch.zeros(positions, head_dim // 2)
    cos[:, : rotated // 2], sin[:, : rotated // 2] = magnitude * angles.cos(), magnitude * angles.sin()
    return cos, sin


def _scaled(inverse: Tensor, theta: float, scaling: tuple[str | float, ...]) -> Tensor:
    kind, *numbers = scaling
    values = [float(x) for x in numbers]
    if kind == "linear":
        return inverse / values[0]
    if kind in ("factors", "longrope"):
        return inverse / torch.tensor(values if kind == "factors" else values[1:-1], dtype=torch.float64)
    if kind == "llama3":
        factor, low, high, original = values
        wavelength = 2 * math.pi / inverse
        smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
        return inverse * ((1 - smooth) / factor + smooth)
    factor, original, fast, slow, _ = values  # yarn
    size = len(inverse)
    low, high = (size * math.log(original / (2 * math.pi * turns), theta) for turns in (fast, slow))
    first, last = max(math.floor(low), 0), min(math.ceil(high), 2 * size - 1)
    slowed = ((torch.arange(size, dtype=torch.float64) - first) / max(last - first, 0.001)).clamp(0, 1)
    return inverse * (slowed / factor + 1 - slowed)


def final_norm(states: Tensor, weight: Tensor, eps: float) -> NDArray[np.float64]:
    """``states`` [rows, hidden_size] after the final norm.

    Rows are computed one by one, because the order of a sum over several could depend on their number.
    """
    scale = weight.double().cpu().numpy()
    rows = [row / np.sqrt(np.square(row).mean() + eps) * scale for row in states.double().cpu().numpy()]
    return np.stack(rows)


class PagedPool(Protocol):
    """A KV pool."""

    pages: int


class BatchLimits(Protocol):
    """The limits of a model's buffers, which `check_batch` applies."""

    config: ModelConfig
    max_rows: int  # of a forward
    max_logit_rows: int  # of a forward
    max_positions: int  # of a sequence

    @property
    def pool(self) -> PagedPool:
        """The KV pool."""


class TargetDecoder(BatchLimits, Protocol):
    """`Decoder` on a CPU, `DeviceDecoder` on a GPU."""

    aux_layers: tuple[int, ...]  # see `Decoder`
    settling: int  # forwards of a shape whose time is not yet representative
    row_sizes: tuple[int, ...]  # numbers of rows to which forwards are padded; empty: they are not padded

    @property
    def aux_hidden_states(self) -> Tensor:
        """[max_rows, len(aux_layers) * hidden_size], by the last forward."""

    def forward(self, batch: ForwardBatch, logit_rows: Sequence[int]) -> Tensor:
        """Compute every row, write its KV, and return logits float32 [len(logit_rows), vocab] of ``logit_rows``."""

    def final_states(self, rows: slice) -> NDArray[np.float64]:
        """The last forward's ``rows`` after the final norm, [rows, hidden_size] in CPU memory."""

    def move_kv(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy KV of global slots (page * 64 + lane) ``source`` to ``target`` in all layers; no source is an earlier
        target."""


class KvPool:
    """The KV cache of a decoder on the CPU, zero-filled; bfloat16 and int8 round keys and values, float32 does not."""

    def __init__(self, config: ModelConfig, pages: int, dtype: torch.dtype = torch.float32) -> None:
        self.pages = pages
        self.tensors = KvTensors.zeros(config.n_layers, pages, config.n_kv_heads, config.head_dim, dtype)


def kv_page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a page of keys and values over all layers, in a `KvPool` or a GPU's pool."""
    scale = torch.float32.itemsize if dtype == torch.int8 else 0
    return 2 * PAGE_SIZE * config.n_layers * config.n_kv_heads * (config.head_dim * dtype.itemsize + scale)


def check_batch(decoder: BatchLimits, batch: ForwardBatch, logit_rows: Sequence[int]) -> None:
    """Check a batch against a decoder's limits.

    Raises:
        ValueError: more rows, logit rows or positions than the buffers hold, or a token or page id out of range.
    """
    if batch.rows > decoder.max_rows:
        raise ValueError(f"batch: {batch.rows} rows, the buffers hold {decoder.max_rows}")
    if len(logit_rows) > decoder.max_logit_rows:
        raise ValueError(f"logit_rows: {len(logit_rows)} rows, the buffers hold {decoder.max_logit_rows}")
    if logit_rows and not 0 <= min(logit_rows) <= max(logit_rows) < batch.rows:
        raise ValueError(f"logit_rows: must lie in [0, {batch.rows})")
    last = int((batch.entry_ctx[batch.entry_of] + batch.depth).max())
    if last >= decoder.max_positions:
        raise ValueError(f"batch: position {last}, the limit is {decoder.max_positions - 1}")
    vocab_size, pages = decoder.config.vocab_size, decoder.pool.pages
    if int(batch.tokens.min()) < 0 or int(batch.tokens.max()) >= vocab_size:
        raise ValueError(f"tokens: ids must lie in [0, {vocab_size})")
    if int(batch.page_table.min()) < 0 or int(batch.page_table.max()) >= pages:
        raise ValueError(f"page_table: ids must lie in [0, {pages})")


def output_and_mlp(
    config: ModelConfig, layer: LayerWeights[H], attended: Tensor, x: Tensor, gate_up: Tensor
) -> list[LinearSpec]:
    """The output projection of ``attended``, and the gated MLP by way of ``gate_up``; both add to ``x``."""
    eps = config.norm_eps
    post: Epilogue = "norm_add" if config.post_norms else "add"
    return [
        LinearSpec(layer.o, attended, x, "none", post, None, layer.attn_post_norm, eps),
        LinearSpec(layer.gate_up, x, gate_up, "rms", "store", layer.mlp_norm, None, eps),
        LinearSpec(layer.down, gate_up, x, config.gate, post, None, layer.mlp_post_norm, eps),
    ]


class Decoder:
    """Runs a model's forward pass over a `ForwardBatch`.

    Buffers for ``max_rows`` rows and ``max_logit_rows`` rows of logits are allocated here; a step allocates
    nothing that grows with context. Results of `forward` are views, valid until the next call.

    ``aux_layers``: layers whose input (the residual stream before the layer) each `forward` copies to
    ``aux_hidden_states``, float32 [max_rows, len(aux_layers) * hidden_size], columns in the order given.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights[HostLinear],
        backend: Backend,
        pool: KvPool,
        *,
        max_rows: int,
        max_logit_rows: int,
        max_positions: int,
        aux_layers: Sequence[int] = (),
    ) -> None:
        self.config, self.weights, self.backend, self.pool = config, weights, backend, pool
        self.max_rows, self.max_logit_rows, self.max_positions = max_rows, max_logit_rows, max_positions
        self.settling = 0
        self.row_sizes: tuple[int, ...] = ()
        self.aux_layers = tuple(aux_layers)
        self.aux_hidden_states = torch.zeros(max_rows, len(aux_layers) * config.hidden_size)
        widest = max(config.hidden_size, config.intermediate_size, config.q_size)
        mlp_rows = max_rows * config.mlps_per_token
        backend.reserve(mlp_rows, widest, config.q_size)
        self._x = torch.zeros(max_rows, config.hidden_size)
        self._qkv = torch.zeros(max_rows, config.q_size + 2 * config.kv_size)
        self._attended = torch.zeros(max_rows, config.q_size)
        self._gate_up = torch.zeros(mlp_rows, 2 * config.intermediate_size)
        if config.experts:
            self._scores = torch.zeros(max_rows, config.experts)
            self._expert_out = torch.zeros(mlp_rows, config.hidden_size)
        self._chosen = torch.zeros(max_logit_rows, config.hidden_size)
        # Not zeros: those would take memory for all rows before a step has so many.
        self._logits = torch.empty(max_logit_rows, weights.lm_head.n)
        self._tables = [
            rope_tables(config.rope, config.head_dim, max_positions, local=local) for local in config.rope.kinds
        ]
        self._runs = self._bind_layers()
        self._lm_head = backend.bind(
            LinearSpec(
                weights.lm_head, self._chosen, self._logits, "rms", "store", weights.final_norm, None, config.norm_eps
            )
        )

    def _bind_layers(self) -> list[tuple[list[Tensor], BoundLayers]]:
        """Layers in runs, which are bound together. A run begins at each layer whose input is kept, and stands with the
        columns of ``aux_hidden_states`` that keep it."""
        width, kept, layers = self.config.hidden_size, self.aux_hidden_states, self.weights.layers
        starts, runs = sorted({0, *self.aux_layers}), []
        for start, end in pairwise([*starts, len(layers)]):
            columns = [kept[:, i * width : (i + 1) * width] for i, at in enumerate(self.aux_layers) if at == start]
            specs = [spec for index in range(start, end) for spec in self._layer(index, layers[index])]
            runs.append((columns, self.backend.bind(*specs)))
        return runs

    def _layer(self, index: int, layer: LayerWeights[HostLinear]) -> list[LayerSpec]:
        c = self.config
        output, *mlp = output_and_mlp(c, layer, self._attended, self._x, self._gate_up)
        return [
            LinearSpec(layer.qkv, self._x, self._qkv, "rms", "store", layer.attn_norm, None, c.norm_eps),
            self._attention_spec(index, layer),
            output,
            *(mlp if layer.router is None else self._experts(layer, layer.router)),
        ]

    def _experts(self, layer: LayerWeights[HostLinear], router: HostLinear) -> list[LayerSpec]:
        c = self.config
        assert isinstance(layer.gate_up, PackedLinear)
        assert isinstance(layer.down, PackedLinear)
        experts = ExpertsSpec(
            experts=c.experts,
            chosen=c.experts_per_token,
            normalise=c.normalise_experts,
            gate_up=layer.gate_up,
            down=layer.down,
            activation=c.gate,
            norm=layer.mlp_norm,
            eps=c.norm_eps,
            scores=self._scores,
            x=self._x,
            gated=self._gate_up,
            out=self._expert_out,
        )
        return [LinearSpec(router, self._x, self._scores, "rms", "store", layer.mlp_norm, None, c.norm_eps), experts]

    def _attention_spec(self, index: int, layer: LayerWeights[HostLinear]) -> AttentionSpec:
        c = self.config
        cos, sin = self._tables[-1 if c.local(index) else 0]
        return AttentionSpec(
            n_heads=c.n_heads,
            n_kv_heads=c.n_kv_heads,
            head_dim=c.head_dim,
            scale=c.attn_scale,
            eps=c.norm_eps,
            window=c.window(index),
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            cos=cos,
            sin=sin,
            qkv=self._qkv,
            out=self._attended,
            kv=self.pool.tensors.layer(index),
        )

    def forward(self, batch: ForwardBatch, logit_rows: Sequence[int]) -> Tensor:
        """Compute every row, write its KV, and return logits float32 [len(logit_rows), rows of the output table].

        Raises:
            ValueError: more rows, logit rows or positions than the buffers hold, or a token id out of range.
        """
        check_batch(self, batch, logit_rows)
        rows = batch.rows
        self.backend.embed(self.weights.embed, batch.tokens, self.config.embed_scale, self._x)
        for kept, run in self._runs:
            for columns in kept:
                columns[:rows].copy_(self._x[:rows])
            run(rows, batch)
        if not logit_rows:
            return self._logits[:0]
        n = len(logit_rows)
        # "clip": in the default mode numpy writes to a buffer first
        np.take(self._x.numpy(), logit_rows, axis=0, out=self._chosen.numpy()[:n], mode="clip")
        self._lm_head(n)
        return self._logits[:n]

    def final_states(self, rows: slice) -> NDArray[np.float64]:
        """See `TargetDecoder.final_states`."""
        return final_norm(self._x[rows], self.weights.final_norm, self.config.norm_eps)

    def move_kv(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        self.pool.tensors.move(source, target)
