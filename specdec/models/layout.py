"""Plans where every array of a model lies in one flat buffer, in memory and in the cache file alike."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.config import WeightDtype
from specdec.models.array_spec import ArraySpec
from specdec.models.model_config import ModelConfig
from specdec.models.tensor_source import TensorSource
from verify_kernels.packed_linear import CHUNK_K, GROUP_K, TILE_N

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
