"""One rank's part of a forward pass: `Decoder`, cut by output rows and KV heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.models.config import ModelConfig
from specdec.models.decoder import KvPool, attention_spec, aux_columns, final_norm, rope_tables
from specdec.models.tensor_parallel.shares import RankShare
from specdec.models.weights import LayerWeights, ModelWeights
from verify_kernels.backend import AddRowsSpec, Backend, GateSpec, LinearSpec, Prologue, RowsOp
from verify_kernels.cpu.shared_ranks import SharedRanks
from verify_kernels.forward_batch import PAGE_SIZE, ForwardBatch
from verify_kernels.packed_weights import HostLinear

HEAD_WORDS = 5  # int32 words before a command's parts, with their lengths


@dataclass(slots=True)
class Command:
    """What all ranks do next, written by the first as int32 in memory that they share: move KV, then a forward."""

    source: list[int] = field(default_factory=list)  # global slots of KV to copy, in order
    target: list[int] = field(default_factory=list)  # global slots that it is copied to
    batch: ForwardBatch | None = None  # None: no forward
    logit_rows: Sequence[int] = ()

    @property
    def moves(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """``source`` and ``target`` as arrays."""
        return np.asarray(self.source, np.int64), np.asarray(self.target, np.int64)


def write_command(command: Command, words: NDArray[np.int32]) -> None:
    """Write ``command`` to the front of ``words``."""
    batch = command.batch
    parts: list[Sequence[int] | NDArray[np.int32]] = [command.source, command.target]
    shape = (0, 0, 0)
    if batch is not None:
        shape = (batch.rows, *batch.page_table.shape)
        parts += [
            batch.tokens, batch.entry_of, batch.parent, batch.depth, batch.diverge,
            batch.entry_start, batch.entry_ctx, batch.page_table.reshape(-1),
        ]  # fmt: skip
    head = (len(command.source), *shape, len(command.logit_rows))
    assert len(head) == HEAD_WORDS
    at = 0
    for part in (head, *parts, command.logit_rows):
        words[at : at + len(part)] = part
        at += len(part)


def read_command(words: NDArray[np.int32]) -> Command:
    """The command that `write_command` wrote; a copy."""
    moves, rows, entries, width, logits = words[:HEAD_WORDS].tolist()
    sizes = (moves, moves, *[rows] * 5, entries + 1 if rows else 0, entries, entries * width, logits)
    flat = words[HEAD_WORDS : HEAD_WORDS + sum(sizes)].copy()
    source, target, *arrays, wanted = np.split(flat, np.cumsum(sizes)[:-1])
    batch = None
    if rows:
        tokens, entry_of, parent, depth, diverge, start, ctx, table = arrays
        batch = ForwardBatch(tokens, entry_of, parent, depth, diverge, start, ctx, table.reshape(entries, width))
    return Command(source.tolist(), target.tolist(), batch, wanted.tolist())


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The capacity of a decoder's buffers."""

    max_rows: int  # of a forward
    max_logit_rows: int  # of a forward
    max_positions: int  # of a sequence
    pages: int  # of KV

    @property
    def command_words(self) -> int:
        """int32 words of the largest command."""
        table = self.max_rows * -(-self.max_positions // PAGE_SIZE)  # as many of the longest sequences, a row each
        return HEAD_WORDS + 9 * self.max_rows + 1 + table + self.max_logit_rows


def shared_shapes(config: ModelConfig, sizes: StepSizes) -> dict[str, tuple[int, int]]:
    """Shapes of the buffers that ranks share, float32.

    Each rank writes its columns of the attention's output, of the gated MLP, of what a block adds to the residual
    stream (at first the embeddings) and of the logits; the first rank writes the command. Nothing is ever summed.
    """
    rows = sizes.max_rows
    return {
        "command": (1, sizes.command_words),
        "attended": (rows, config.q_size),
        "gated": (rows, config.intermediate_size),
        "added": (rows, config.hidden_size),
        "logits": (sizes.max_logit_rows, config.vocab_size),
    }


def share_pool(share: RankShare, sizes: StepSizes, dtype: torch.dtype) -> KvPool | None:
    """The KV cache of a rank's heads; None for a rank without heads."""
    if share.n_kv_heads == 0:
        return None
    return KvPool(replace(share.config, n_kv_heads=share.n_kv_heads), sizes.pages, dtype)


class ShardDecoder:
    """Runs a rank's share of the layers. Every rank calls `forward` with the same batch at the same time.

    The residual stream is whole on every rank. Four times a layer the ranks meet, then read what all have written:
    attended heads, what the attention adds, gated channels, what the MLP adds. A buffer is written again only after a
    later meeting, which a rank reaches only after reading it.

    ``weights``: the share's. ``aux_layers``, ``aux_hidden_states``: as in `Decoder`, the same on every rank.
    """

    def __init__(
        self,
        share: RankShare,
        weights: ModelWeights[HostLinear],
        backend: Backend,
        pool: KvPool | None,
        ranks: SharedRanks,
        sizes: StepSizes,
        aux_layers: Sequence[int] = (),
    ) -> None:
        c = share.config
        self.share, self.weights, self.backend, self.pool = share, weights, backend, pool
        self._ranks = ranks
        self.aux_layers = tuple(aux_layers)
        self.aux_hidden_states = torch.zeros(sizes.max_rows, len(aux_layers) * c.hidden_size)
        heads = max(share.n_heads, 1) * c.head_dim
        backend.reserve(sizes.max_rows, max(c.hidden_size, c.intermediate_size, c.q_size), heads)
        self._x = torch.zeros(sizes.max_rows, c.hidden_size)
        self._qkv = torch.zeros(sizes.max_rows, (share.n_heads + 2 * share.n_kv_heads) * c.head_dim)
        self._gate_up = torch.zeros(sizes.max_rows, 2 * (share.inner[1] - share.inner[0]))
        self._chosen = torch.zeros(sizes.max_logit_rows, c.hidden_size)
        self._added, self._logits = ranks.buffer("added"), ranks.buffer("logits")
        self._tables = {
            local: rope_tables(c.rope, c.head_dim, sizes.max_positions, local=local) for local in (False, True)
        }
        self._layers = [self._bind(i, layer) for i, layer in enumerate(weights.layers)]
        self._aux_columns = aux_columns(self.aux_hidden_states, self.aux_layers, c)
        self._lm_head = backend.linear(
            LinearSpec(
                weights.lm_head, self._chosen, _columns(self._logits, share.vocab), "rms", "store",
                weights.final_norm, None, c.norm_eps,
            )
        )  # fmt: skip

    def _bind(self, index: int, layer: LayerWeights[HostLinear]) -> Callable[[ForwardBatch], None]:
        c, share, backend, meet = self.share.config, self.share, self.backend, self._ranks.meet
        attended, gated = self._ranks.buffer("attended"), self._ranks.buffer("gated")
        activation: Prologue = "silu" if c.activation == "silu" else "gelu"
        attend = self._bind_attention(index, layer, attended)
        added = _columns(self._added, share.hidden)
        o = backend.linear(LinearSpec(layer.o, attended, added))
        add_attention = self._bind_add(layer.attn_post_norm)
        gate_up = backend.linear(
            LinearSpec(layer.gate_up, self._x, self._gate_up, "rms", "store", layer.mlp_norm, None, c.norm_eps)
        )
        gate = backend.gate(GateSpec(self._gate_up, _columns(gated, share.inner), activation))
        down = backend.linear(LinearSpec(layer.down, gated, added))
        add_mlp = self._bind_add(layer.mlp_post_norm)

        def run(batch: ForwardBatch) -> None:
            rows = batch.rows
            attend(batch)
            meet()
            o(rows)
            meet()
            add_attention(rows)
            gate_up(rows)
            gate(rows)
            meet()
            down(rows)
            meet()
            add_mlp(rows)

        return run

    def _bind_attention(
        self, index: int, layer: LayerWeights[HostLinear], attended: Tensor
    ) -> Callable[[ForwardBatch], None]:
        c, share = self.share.config, self.share
        if share.n_kv_heads == 0 or self.pool is None:
            return lambda batch: None
        qkv = self.backend.linear(
            LinearSpec(layer.qkv, self._x, self._qkv, "rms", "store", layer.attn_norm, None, c.norm_eps)
        )
        out = _columns(attended, share.attended)
        attention = self.backend.attention(attention_spec(c, index, layer, self._tables, self.pool, self._qkv, out))

        def run(batch: ForwardBatch) -> None:
            qkv(batch.rows)
            attention(batch)

        return run

    def _bind_add(self, post_norm: Tensor | None) -> RowsOp:
        return self.backend.add_rows(AddRowsSpec(self._added, self._x, post_norm, self.share.config.norm_eps))

    def embed(self, batch: ForwardBatch) -> None:
        """Write the embeddings of a batch's tokens for all ranks: on the first rank, before any rank's `forward`."""
        self.backend.embed(self.weights.embed, batch.tokens, self.share.config.embed_scale, self._added)

    def forward(self, batch: ForwardBatch, logit_rows: Sequence[int]) -> Tensor:
        """Compute this rank's share of every row, write its KV, and return whole logits float32 [logit_rows, vocab].

        The ranks must have met since `embed`.

        Raises:
            RankLostError: another rank is gone.
        """
        rows = batch.rows
        self._x[:rows].copy_(self._added[:rows])
        for layer, kept in zip(self._layers, self._aux_columns, strict=True):
            for columns in kept:
                columns[:rows].copy_(self._x[:rows])
            layer(batch)
        if logit_rows:
            self.backend.gather_rows(self._x, np.asarray(logit_rows, np.int32), self._chosen)
            self._lm_head(len(logit_rows))
        self._ranks.meet()
        return self._logits[: len(logit_rows)]

    def final_states(self, rows: slice) -> NDArray[np.float64]:
        """See `TargetDecoder.final_states`."""
        return final_norm(self._x[rows], self.weights.final_norm, self.share.config.norm_eps)

    def move_kv(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """As `Decoder.move_kv`, for this rank's heads."""
        if self.pool is not None:
            self.backend.move_kv(self.pool.tensors, source, target)


def _columns(buffer: Tensor, span: tuple[int, int]) -> Tensor:
    return buffer[:, span[0] : span[1]]
