"""A model's packed weights: which arrays there are, and where each lies in one flat buffer."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.config import WeightDtype
from specdec.models.checkpoint import TensorSource
from specdec.models.config import ModelConfig
from verify_kernels.packed_weights import CHUNK_K, GROUP_K, TILE_N, PackedLinear

DTYPES = {
    "uint8": torch.uint8,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array of ``shape`` and ``dtype`` (a key of `DTYPES`) that starts ``offset`` bytes into the buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array, without the padding after it."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


ALIGNMENT = 4096  # a page: arrays can be read straight into place, and no two share a page


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """A fused linear layer: its name, the roles stacked to make its rows with their row counts, its columns."""

    name: str
    parts: tuple[tuple[str, int], ...]
    columns: int

    @property
    def rows(self) -> int:
        """Rows of the fused matrix."""
        return sum(count for _, count in self.parts)


def linear_plans(config: ModelConfig, tied: bool) -> list[LinearPlan]:
    """Every linear layer of the model, in the order a forward reads them."""
    hidden, plans = config.hidden_size, []
    for i in range(config.n_layers):
        p = f"layers.{i}."
        q, kv, ffn = config.q_size, config.kv_size, config.intermediate_size
        plans += [
            LinearPlan(p + "qkv", ((p + "q", q), (p + "k", kv), (p + "v", kv)), hidden),
            LinearPlan(p + "o", ((p + "o", hidden),), q),
            LinearPlan(p + "gate_up", ((p + "gate", ffn), (p + "up", ffn)), hidden),
            LinearPlan(p + "down", ((p + "down", hidden),), ffn),
        ]
    plans.append(LinearPlan("lm_head", (("embed" if tied else "lm_head", config.vocab_size),), hidden))
    return plans


def norm_plans(config: ModelConfig) -> list[tuple[str, int]]:
    """Every norm of the model as (role, length)."""
    names = [("attn_norm", config.hidden_size), ("mlp_norm", config.hidden_size)]
    if config.qk_norm:
        names += [("q_norm", config.head_dim), ("k_norm", config.head_dim)]
    if config.post_norms:
        names += [("attn_post_norm", config.hidden_size), ("mlp_post_norm", config.hidden_size)]
    layers = [(f"layers.{i}.{name}", size) for i in range(config.n_layers) for name, size in names]
    return [*layers, ("final_norm", config.hidden_size)]


def linear_kind(name: str, dtype: WeightDtype) -> WeightDtype:
    """How the linear layer ``name`` is stored in a model of ``dtype``. Of an int4 model only the gate and up
    projections are, half of its weights; the rest is int8: all of it in int4 costs a small draft model a fifth of its
    accepted tokens (log, 2026-11-21)."""
    return "int8" if dtype == "int4" and not name.endswith("gate_up") else dtype


def has_bias(plan: LinearPlan, source: TensorSource) -> bool:
    """Whether any part of the linear layer carries a bias (the others' is zero then)."""
    return any(source.has(role + ".bias") for role, _ in plan.parts)


def plan_layout(source: TensorSource, dtype: WeightDtype) -> list[ArraySpec]:
    """Arrays of the packed model with their page-aligned offsets, in file order."""
    config = source.config
    arrays: list[tuple[str, str, tuple[int, ...]]] = []
    for plan in linear_plans(config, config.tie_embeddings):
        tiles, groups = -(-plan.rows // TILE_N), -(-plan.columns // GROUP_K)
        kind = linear_kind(plan.name, dtype)
        if kind == "int4":
            pairs, chunks = -(-plan.columns // (2 * GROUP_K)), -(-plan.columns // CHUNK_K)
            arrays.append((plan.name + ".data", "uint8", (tiles, pairs, TILE_N, GROUP_K)))
            arrays.append((plan.name + ".scale", "float32", (tiles, chunks, TILE_N)))
        elif kind == "int8":
            arrays.append((plan.name + ".data", "uint8", (tiles, groups, TILE_N, GROUP_K)))
            arrays.append((plan.name + ".scale", "float32", (tiles * TILE_N,)))
        else:
            stored = "bfloat16" if kind == "bf16" else "float32"
            arrays.append((plan.name + ".data", stored, (tiles, plan.columns, TILE_N)))
        if has_bias(plan, source):
            arrays.append((plan.name + ".bias", "float32", (tiles * TILE_N,)))
    arrays += [(role, "float32", (size,)) for role, size in norm_plans(config)]
    embed = "float32" if dtype == "fp32" else "float16"
    arrays.append(("embed", embed, (config.vocab_size, config.hidden_size)))
    return _place(arrays)


def layout_bytes(layout: list[ArraySpec]) -> int:
    """Bytes of the buffer that holds the layout, padding included."""
    return max((align(spec.offset + spec.nbytes) for spec in layout), default=0)


def align(offset: int) -> int:
    """The next page boundary at or after ``offset``."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _place(arrays: list[tuple[str, str, tuple[int, ...]]]) -> list[ArraySpec]:
    layout: list[ArraySpec] = []
    offset = 0
    for name, dtype, shape in arrays:
        spec = ArraySpec(name, dtype, shape, offset)
        layout.append(spec)
        offset = align(offset + spec.nbytes)
    return layout


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer.

    Norms are float32 [hidden] (``q_norm`` and ``k_norm``: [head_dim]) and already hold Gemma's +1.
    ``qkv`` has rows [q; k; v], ``gate_up`` rows [gate; up]; rotary rows are in half-split order.
    """

    attn_norm: Tensor
    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: PackedLinear
    attn_post_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    mlp_post_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a model.

    ``embed`` is [vocab, hidden], float16 for int8 and bf16, float32 for fp32. ``lm_head`` is always its own
    packed matrix, packed from the embedding where the two are tied.
    """

    embed: Tensor
    layers: list[LayerWeights]
    final_norm: Tensor
    lm_head: PackedLinear


class WeightsBuffer:
    """Private anonymous memory, on huge pages where the system grants them, with a tensor view per array.

    Kernels stream the weights once per step: with 4 KiB pages a good part of that time is page-table walks.
    The views keep the memory alive; it is given back when the last of them is gone.
    """

    def __init__(self, layout: list[ArraySpec]) -> None:
        self.layout = layout
        self.nbytes = layout_bytes(layout)
        self._memory = _allocate(self.nbytes)
        flat = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._views = {spec.name: _view(flat, spec) for spec in layout}

    def bytes_view(self) -> memoryview:
        """The whole buffer, writable, as a cache file is read into it or written from it."""
        return memoryview(self._memory)[: self.nbytes]

    def view(self, name: str) -> Tensor:
        """The array called ``name``; writing to it writes the buffer."""
        return self._views[name]

    def find(self, name: str) -> Tensor | None:
        """The array called ``name``, or None when the model has none."""
        return self._views.get(name)

    def weights(self, config: ModelConfig, dtype: WeightDtype) -> ModelWeights:
        """The decoder's view of the buffer; shares its memory."""
        hidden = config.hidden_size
        return ModelWeights(
            embed=self.view("embed"),
            layers=[self._layer(config, dtype, f"layers.{i}.") for i in range(config.n_layers)],
            final_norm=self.view("final_norm"),
            lm_head=self._linear("lm_head", dtype, config.vocab_size, hidden),
        )

    def _layer(self, config: ModelConfig, dtype: WeightDtype, p: str) -> LayerWeights:
        hidden, ffn = config.hidden_size, config.intermediate_size
        return LayerWeights(
            attn_norm=self.view(p + "attn_norm"),
            qkv=self._linear(p + "qkv", dtype, config.q_size + 2 * config.kv_size, hidden),
            q_norm=self.find(p + "q_norm"),
            k_norm=self.find(p + "k_norm"),
            o=self._linear(p + "o", dtype, hidden, config.q_size),
            attn_post_norm=self.find(p + "attn_post_norm"),
            mlp_norm=self.view(p + "mlp_norm"),
            gate_up=self._linear(p + "gate_up", dtype, 2 * ffn, hidden),
            down=self._linear(p + "down", dtype, hidden, ffn),
            mlp_post_norm=self.find(p + "mlp_post_norm"),
        )

    def _linear(self, name: str, dtype: WeightDtype, n: int, k: int) -> PackedLinear:
        kind = linear_kind(name, dtype)
        return PackedLinear(
            kind, n, k, self.view(name + ".data"), self.find(name + ".scale"), self.find(name + ".bias")
        )


def _allocate(nbytes: int) -> mmap.mmap:
    # private, because the default (shared) anonymous memory is not eligible for transparent huge pages
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _view(flat: Tensor, spec: ArraySpec) -> Tensor:
    assert math.prod(spec.shape) > 0, spec.name
    piece = flat[spec.offset : spec.offset + spec.nbytes]
    return piece.view(DTYPES[spec.dtype]).view(spec.shape)
