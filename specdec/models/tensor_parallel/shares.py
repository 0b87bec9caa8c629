"""Divides a model among ranks: rows of every matrix, heads, and processors.

Matrices are cut by output rows, on whole tiles, and attention by KV head. A rank computes each of its sums alone, so
the number of ranks changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.errors import ConfigError
from specdec.models.config import ModelConfig
from specdec.models.weights import ArraySpec, Copied, align
from verify_kernels.packed_weights import TILE_N

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RankShare:
    """What rank ``rank`` of ``size`` computes of a model. Spans are [low, high)."""

    rank: int
    size: int
    config: ModelConfig
    kv_heads: Span  # with all their query heads
    hidden: Span  # rows of the layers that add to the residual stream
    inner: Span  # channels of the MLP
    vocab: Span  # rows of the output table

    @property
    def n_kv_heads(self) -> int:
        """KV heads of this rank; 0 where there are fewer than ranks."""
        return self.kv_heads[1] - self.kv_heads[0]

    @property
    def n_heads(self) -> int:
        """Query heads of this rank."""
        return self.n_kv_heads * self._group

    @property
    def attended(self) -> Span:
        """Columns of the attention's output."""
        width = self._group * self.config.head_dim
        return self.kv_heads[0] * width, self.kv_heads[1] * width

    @property
    def _group(self) -> int:
        return self.config.n_heads // self.config.n_kv_heads

    def rows(self, layer: str) -> list[Span]:
        """The rank's rows of the fused matrix ``layer`` (the end of a plan's name), in the rank's order."""
        c = self.config
        if layer == "qkv":
            low, high = (head * c.head_dim for head in self.kv_heads)
            k, v = c.q_size, c.q_size + c.kv_size
            return [self.attended, (k + low, k + high), (v + low, v + high)] if high > low else []
        if layer == "gate_up":
            low, high = self.inner
            return [(low, high), (c.intermediate_size + low, c.intermediate_size + high)]
        return [self.vocab if layer == "lm_head" else self.hidden]


def share_out(config: ModelConfig, size: int) -> list[RankShare]:
    """The shares of ``size`` ranks, as even as whole tiles and heads allow.

    With more ranks than KV heads, some ranks have no head and only their rows of the other layers.

    Raises:
        ConfigError: a matrix has fewer tiles than there are ranks, or does not fall on whole tiles.
    """
    c, q_rows = config, config.head_dim * config.n_heads // config.n_kv_heads
    heads = next((n for n in range(1, TILE_N + 1) if n * q_rows % TILE_N == n * c.head_dim % TILE_N == 0), TILE_N)
    if c.kv_size % TILE_N or c.q_size % TILE_N or c.n_kv_heads % heads or c.intermediate_size % TILE_N:
        raise ConfigError(
            f"engine.tp: {c.n_kv_heads} KV heads of {c.head_dim} channels and an MLP of {c.intermediate_size} do not "
            f"fall on tiles of {TILE_N} rows, so the model can not be cut; set it to 1"
        )
    tiles = {"hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "vocab_size": c.vocab_size}
    name, narrowest = min(tiles.items(), key=lambda item: item[1])
    most = -(-narrowest // TILE_N)
    if most < size:
        raise ConfigError(
            f"engine.tp: {size} processes, but the model's {name} {narrowest} is only {most} tiles of {TILE_N} rows; "
            f"set it to {most} at most"
        )
    kv = [(a * heads, b * heads) for a, b in _spans(c.n_kv_heads // heads, size)]
    spans = [_tiled(width, size) for width in (c.hidden_size, c.intermediate_size, c.vocab_size)]
    return [RankShare(rank, size, c, *each) for rank, each in enumerate(zip(kv, *spans, strict=True))]


def _spans(units: int, size: int) -> list[Span]:
    """``units`` divided among the ranks. The first ranks get the smaller parts: the very first has other work too."""
    return [(units * rank // size, units * (rank + 1) // size) for rank in range(size)]


def _tiled(width: int, size: int) -> list[Span]:
    return [(low * TILE_N, min(high * TILE_N, width)) for low, high in _spans(-(-width // TILE_N), size)]


def share_layout(layout: Sequence[ArraySpec], share: RankShare) -> tuple[list[ArraySpec], list[Copied]]:
    """The arrays of a rank's packed weights, and the copies from the whole model's ``layout`` that fill them.

    Tiles are copied as they are. Only the first rank has the embedding: it looks rows up for all.
    """
    arrays: list[ArraySpec] = []
    copies: list[Copied] = []

    def add(spec: ArraySpec, name: str, first: int, pieces: Sequence[Span]) -> None:
        """Add an array of ``pieces`` of ``spec``'s first dimension, ``first`` long in all."""
        step = spec.nbytes // spec.shape[0]
        offset = align(arrays[-1].offset + arrays[-1].nbytes) if arrays else 0
        arrays.append(ArraySpec(name, spec.dtype, (first, *spec.shape[1:]), offset))
        for low, high in pieces:
            copies.append(Copied(spec.offset + low * step, offset, (high - low) * step))
            offset += (high - low) * step

    starts = _piece_starts(layout)
    own_embed = any(spec.name == "embed" or spec.name.startswith("embed/") for spec in layout)
    for spec in layout:
        piece, _, part = spec.name.rpartition(".")
        if "/" not in spec.name or piece.startswith("embed/"):
            if share.rank == 0 or not (spec.name == "embed" or piece.startswith("embed/")):
                add(spec, spec.name, spec.shape[0], [(0, spec.shape[0])])
            continue
        plan, place, count, kind = piece.split("/")
        rows = _inside(share.rows(plan.rpartition(".")[2]), starts[piece], int(count))
        if share.rank == 0 and plan == "lm_head" and not own_embed:
            add(spec, f"embed/{place}/{count}/{kind}.{part}", spec.shape[0], [(0, spec.shape[0])])
        if not rows:
            continue
        name = f"{plan}/{place}/{sum(high - low for low, high in rows)}/{kind}.{part}"
        if part == "order":
            add(spec, name, spec.shape[0], [(0, spec.shape[0])])
            continue
        unit = 1 if part == "data" else TILE_N
        tiles = [(low // TILE_N * unit, -(-high // TILE_N) * unit) for low, high in rows]
        add(spec, name, sum(high - low for low, high in tiles), tiles)
    return arrays, sorted(copies, key=lambda copied: copied.source)


def _piece_starts(layout: Sequence[ArraySpec]) -> dict[str, int]:
    """The row of its fused matrix at which each piece begins, by the piece's name."""
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    for spec in layout:
        piece, _, part = spec.name.rpartition(".")
        if part == "data":
            plan, _, count, _ = piece.split("/")
            starts[piece] = ends.get(plan, 0)
            ends[plan] = starts[piece] + int(count)
    return starts


def _inside(spans: Sequence[Span], start: int, count: int) -> list[Span]:
    """Parts of ``spans`` in [start, start + count), counted from ``start``."""
    cut = [(max(low - start, 0), min(high - start, count)) for low, high in spans]
    return [(low, high) for low, high in cut if low < high]


_NODES = Path("/sys/devices/system/node")  # Linux's NUMA nodes


def rank_processors(size: int, allowed: set[int], nodes: Path = _NODES) -> list[set[int]] | None:
    """The processors of each of ``size`` ranks, out of ``allowed``: whole NUMA nodes, or parts of one.

    A rank's weights then lie in the memory nearest to it. None with a single node, or where nodes are not listed.
    """
    found = [cpus & allowed for cpus in _nodes(nodes)]
    parts = [sorted(cpus) for cpus in found if cpus]
    if len(parts) < 2:
        return None
    if size <= len(parts):
        spans = [parts[len(parts) * rank // size : len(parts) * (rank + 1) // size] for rank in range(size)]
        return [set().union(*span) for span in spans]
    ranks: list[set[int]] = []
    for number, cpus in enumerate(parts):
        first, last = (-(-size * each // len(parts)) for each in (number, number + 1))
        share = last - first
        if len(cpus) < share:
            return None
        ranks += [set(cpus[len(cpus) * i // share : len(cpus) * (i + 1) // share]) for i in range(share)]
    return ranks


def _nodes(folder: Path) -> list[set[int]]:
    files = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name.removeprefix("node")))
    try:
        return [_cpus(file.read_text()) for file in files]
    except (OSError, ValueError):
        return []


def _cpus(text: str) -> set[int]:
    """The processors of a list as Linux writes it, such as 0-3,8."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found
