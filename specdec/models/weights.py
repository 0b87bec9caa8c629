"""A model's weights: which there are, on a CPU as on a GPU, and the flat buffer that holds a CPU's packed ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from specdec.config import WeightDtype
from specdec.errors import UnsupportedModelError
from specdec.models.checkpoint import TensorSource
from specdec.models.config import ModelConfig
from verify_kernels.backend import allocate
from verify_kernels.packed_weights import (
    GROUP_K,
    TILE_N,
    BlockKind,
    Embedding,
    HostLinear,
    PackedLinear,
    StackedLinear,
    WeightKind,
)
from verify_kernels.quant_formats import FORMATS, GROUP, packed_shape

DTYPES = {
    "uint8": torch.uint8,
    "int32": torch.int32,
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

    @property
    def holds_experts(self) -> bool:
        """Whether its parts are those of a layer's experts."""
        return ".experts." in self.parts[0][0]


def linear_plans(config: ModelConfig) -> list[LinearPlan]:
    """Every linear layer of the model, in the order a forward reads them."""
    hidden, plans = config.hidden_size, []
    for i in range(config.n_layers):
        p = f"layers.{i}."
        q, kv, ffn = config.q_size, config.kv_size, config.intermediate_size
        mlps = [f"{p}experts.{e}." for e in range(config.experts)] or [p]
        plans += [
            LinearPlan(p + "qkv", ((p + "q", q), (p + "k", kv), (p + "v", kv)), hidden),
            LinearPlan(p + "o", ((p + "o", hidden),), q),
            *([LinearPlan(p + "router", ((p + "router", config.experts),), hidden)] if config.experts else []),
            LinearPlan(p + "gate_up", tuple((mlp + part, ffn) for mlp in mlps for part in ("gate", "up")), hidden),
            LinearPlan(p + "down", tuple((mlp + "down", hidden) for mlp in mlps), ffn),
        ]
    outputs = config.output_size or config.vocab_size
    plans.append(LinearPlan("lm_head", (("embed" if config.tie_embeddings else "lm_head", outputs),), hidden))
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


def tensor_shapes(config: ModelConfig, biased: Callable[[str], bool]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the model by its role. biased: whether a linear layer's role has a bias."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, config.hidden_size)}
    for plan in linear_plans(config):
        for role, rows in plan.parts:
            shapes[role] = (rows, plan.columns)
            if biased(role):
                shapes[role + ".bias"] = (rows,)
    return shapes | {role: (size,) for role, size in norm_plans(config)}


@dataclass(frozen=True, slots=True)
class LinearPiece:
    """Neighbouring parts of a fused linear layer that are packed as one matrix; usually all parts."""

    plan: LinearPlan  # of these parts
    place: int  # index among the layer's pieces
    kind: WeightKind
    order: Tensor | None = None  # see `PackedLinear`

    @property
    def name(self) -> str:
        """Prefix of its arrays' names, which `WeightsBuffer` parses."""
        return f"{self.plan.name}/{self.place}/{self.plan.rows}/{self.kind}"


FOUR_BITS = ("q4_0", "q4_1", "q4_k", "u4_32", "u4_64", "u4_128")


def linear_pieces(source: TensorSource, dtype: WeightDtype) -> list[LinearPiece]:
    """How every linear layer of a model is packed, in the order a forward reads them.

    An embedding in blocks comes last, unless it is the output table too.
    """
    pieces: list[LinearPiece] = []
    for plan in linear_plans(source.config):
        found = _plan_pieces(source, plan, dtype)
        if plan.holds_experts and (len(found) > 1 or found[0].order is not None):
            # a kernel finds an expert by its place in one matrix
            found = [LinearPiece(plan, 0, "q4_0" if dtype == "int4" and plan.columns % GROUP == 0 else "int8")]
        pieces += found
    embed = _embedding_blocks(source, dtype)
    if embed is not None and not (source.config.tie_embeddings and pieces[-1].kind == embed):
        plan = LinearPlan("embed", (("embed", source.config.vocab_size),), source.config.hidden_size)
        pieces.append(LinearPiece(plan, 0, embed))
    return pieces


def _plan_pieces(source: TensorSource, plan: LinearPlan, dtype: WeightDtype) -> list[LinearPiece]:
    pieces: list[LinearPiece] = []
    for part in plan.parts:
        kind = _linear_kind(source, plan.name, part[0], dtype)
        stored = source.stored_blocks(part[0])
        order = stored.order if stored is not None and stored.kind == kind else None
        last = pieces[-1] if pieces else None
        if last is not None and last.kind == kind and _same(last.order, order):
            pieces[-1] = replace(last, plan=replace(plan, parts=(*last.plan.parts, part)))
        else:
            pieces.append(LinearPiece(replace(plan, parts=(part,)), len(pieces), kind, order))
    return pieces


def _embedding_blocks(source: TensorSource, dtype: WeightDtype) -> BlockKind | None:
    """The block format in which the embedding stays; None where it becomes floats."""
    stored = source.stored_blocks("embed") if dtype in ("auto", "int3", "int4") else None
    return None if stored is None or stored.order is not None else stored.kind


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _linear_kind(source: TensorSource, name: str, role: str, dtype: WeightDtype) -> WeightKind:
    """How ``role``, a part of the layer ``name``, is packed in a model of ``dtype``.

    int4 means blocks of four bits, stored ones or rounded to Q4_0; the output table keeps eight bits. int3 is int4 with
    feed-forward matrices rounded to Q3_0, which costs a draft model fewer accepted tokens than in attention. Scores of
    experts are not rounded: between two that are nearly equal, a small error chooses another one.
    """
    if name.endswith(".router"):
        return "fp32"
    found = source.stored_blocks(role)
    stored = None if found is None else found.kind
    if dtype == "auto":
        return stored or "int8"
    if dtype != "int3" and dtype != "int4":
        return dtype
    if name == "lm_head":
        return "q8_0" if stored == "q8_0" else "int8"
    if source.shape(role)[1] % GROUP:
        return "int8"
    if dtype == "int3" and name.endswith(("gate_up", "down")):
        return "q3_0"
    return stored if stored in FOUR_BITS else "q4_0"


def has_bias(plan: LinearPlan, source: TensorSource) -> bool:
    """Whether any part of the linear layer has a bias; that of the other parts is then zero."""
    return any(source.has(role + ".bias") for role, _ in plan.parts)


def plan_layout(source: TensorSource, dtype: WeightDtype) -> list[ArraySpec]:
    """Arrays of the packed model with their page-aligned offsets, in file order."""
    config = source.config
    arrays: list[tuple[str, str, tuple[int, ...]]] = []
    for piece in linear_pieces(source, dtype):
        plan, kind, name = piece.plan, piece.kind, piece.name
        tiles, groups = -(-plan.rows // TILE_N), -(-plan.columns // GROUP_K)
        if kind == "int8":
            arrays.append((name + ".data", "uint8", (tiles, groups, TILE_N, GROUP_K)))
            arrays.append((name + ".scale", "float32", (tiles * TILE_N,)))
        elif kind in FORMATS:
            arrays.append((name + ".data", "uint8", packed_shape(kind, plan.rows, plan.columns)))
        else:
            stored = "bfloat16" if kind == "bf16" else "float32"
            arrays.append((name + ".data", stored, (tiles, plan.columns, TILE_N)))
        if piece.order is not None:
            arrays.append((name + ".order", "int32", (plan.columns,)))
        if has_bias(plan, source):
            if plan.holds_experts:
                raise UnsupportedModelError(f"{source.name}: experts with a bias are not supported; use another model")
            arrays.append((name + ".bias", "float32", (tiles * TILE_N,)))
    arrays += [(role, "float32", (size,)) for role, size in norm_plans(config)]
    if _embedding_blocks(source, dtype) is None:
        embed = "float32" if dtype == "fp32" else "float16"
        arrays.append(("embed", embed, (config.vocab_size, config.hidden_size)))
    if config.output_size is not None:
        arrays.append(("output_ids", "int32", (config.output_size,)))
    return _place(arrays)


def layout_bytes(layout: Sequence[ArraySpec]) -> int:
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


class LinearLayer(Protocol):
    """`PackedLinear` on a CPU, `specdec.models.device_weights.DeviceLinear` on a GPU."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights one pass reads."""


L = TypeVar("L", bound=LinearLayer)


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[L]):
    """One decoder layer.

    Norms are [hidden] (``q_norm`` and ``k_norm``: [head_dim]) and already hold Gemma's +1.
    ``qkv`` has rows [q; k; v], ``gate_up`` rows [gate; up]; rotary rows are in half-split order. In a layer of experts
    ``gate_up`` and ``down`` hold those of all experts, one after the other.
    """

    attn_norm: Tensor
    qkv: L
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: L
    attn_post_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: L
    down: L
    mlp_post_norm: Tensor | None
    router: L | None = None  # scores of experts
    mlp_share: float = 1.0  # part of gate_up and down that a row reads

    @property
    def nbytes(self) -> float:
        """Bytes of weights that a row reads."""
        always = self.qkv.nbytes + self.o.nbytes + (0 if self.router is None else self.router.nbytes)
        return always + self.mlp_share * (self.gate_up.nbytes + self.down.nbytes)

    @property
    def linears(self) -> tuple[L, L, L, L]:
        """Its linear layers, in the order a forward reads them."""
        return self.qkv, self.o, self.gate_up, self.down

    def with_linears(self, changed: Callable[[L], L]) -> LayerWeights[L]:
        """This layer with ``changed`` linear layers."""
        qkv, o, gate_up, down = map(changed, self.linears)
        return replace(self, qkv=qkv, o=o, gate_up=gate_up, down=down)


@dataclass(frozen=True, slots=True)
class ModelWeights(Generic[L]):
    """All weights of a model.

    On a CPU norms are float32. On a GPU norms, ``embed`` and ``lm_head`` have the type of the rows.
    """

    embed: Embedding
    """[vocab, hidden]. On a CPU the file's blocks, float32 for fp32, else float16. On a GPU it shares ``lm_head``'s
    memory if the two are tied."""
    layers: list[LayerWeights[L]]
    final_norm: Tensor
    lm_head: L
    output_ids: Tensor | None = None
    """int32, increasing: the token of each row of an output table that was cut."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights one pass over a row reads."""
        return self.lm_head.nbytes + round(sum(layer.nbytes for layer in self.layers))

    def with_linears(self, changed: Callable[[L], L]) -> ModelWeights[L]:
        """These weights with ``changed`` linear layers."""
        layers = [layer.with_linears(changed) for layer in self.layers]
        return replace(self, layers=layers, lm_head=changed(self.lm_head))


def gather_weights(
    config: ModelConfig, embed: Embedding, linear: Callable[[LinearPlan], L], norm: Callable[[str], Tensor]
) -> ModelWeights[L]:
    """A model's weights, of which ``linear`` gives each linear layer and ``norm`` each norm by its role."""
    plans = {plan.name: plan for plan in linear_plans(config)}
    roles = {role for role, _ in norm_plans(config)}

    def optional(role: str) -> Tensor | None:
        return norm(role) if role in roles else None

    def layer(p: str) -> LayerWeights[L]:
        return LayerWeights(
            attn_norm=norm(p + "attn_norm"),
            qkv=linear(plans[p + "qkv"]),
            q_norm=optional(p + "q_norm"),
            k_norm=optional(p + "k_norm"),
            o=linear(plans[p + "o"]),
            attn_post_norm=optional(p + "attn_post_norm"),
            mlp_norm=norm(p + "mlp_norm"),
            gate_up=linear(plans[p + "gate_up"]),
            down=linear(plans[p + "down"]),
            mlp_post_norm=optional(p + "mlp_post_norm"),
            router=linear(plans[p + "router"]) if config.experts else None,
            mlp_share=config.mlp_share,
        )

    layers = [layer(f"layers.{i}.") for i in range(config.n_layers)]
    return ModelWeights(embed, layers, norm("final_norm"), linear(plans["lm_head"]))


class WeightsBuffer:
    """Private anonymous memory, on huge pages where the system grants them, with a tensor view per array.

    Kernels stream the weights once per step: with 4 KiB pages a good part of that time is page-table walks.
    The views keep the memory alive; it is released with the last of them.
    """

    def __init__(self, layout: list[ArraySpec]) -> None:
        self.layout = layout
        self.nbytes = layout_bytes(layout)
        self._memory = allocate(self.nbytes)
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

    def weights(self, config: ModelConfig) -> ModelWeights[HostLinear]:
        """The decoder's view of the buffer; shares its memory."""
        pieces: dict[str, list[str]] = {}
        for spec in self.layout:
            name, ending = spec.name[:-5], spec.name[-5:]
            if ending == ".data":
                pieces.setdefault(name.partition("/")[0], []).append(name)

        def packed(name: str, columns: int) -> PackedLinear:
            _, _, rows, kind = name.split("/")
            return PackedLinear(
                cast(WeightKind, kind), int(rows), columns, self.view(name + ".data"),
                self.find(name + ".scale"), self.find(name + ".bias"), self.find(name + ".order"),
            )  # fmt: skip

        def linear(plan: LinearPlan) -> HostLinear:
            parts = tuple(packed(name, plan.columns) for name in pieces[plan.name])
            return parts[0] if len(parts) == 1 else StackedLinear(parts)

        embed: Embedding | None = self.find("embed")
        if embed is None:
            (name,) = pieces.get("embed") or pieces["lm_head"]
            embed = packed(name, config.hidden_size)
        whole = gather_weights(config, embed, linear, self.view)
        return replace(whole, output_ids=self.find("output_ids"))


def _view(flat: Tensor, spec: ArraySpec) -> Tensor:
    assert math.prod(spec.shape) > 0, spec.name
    piece = flat[spec.offset : spec.offset + spec.nbytes]
    return piece.view(DTYPES[spec.dtype]).view(spec.shape)
