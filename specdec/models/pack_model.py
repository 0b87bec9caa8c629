"""Turns a checkpoint's tensors into packed weights, a slice of rows at a time, on a small pool of threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import as_completed

import torch
from torch import Tensor

from specdec.config import WeightDtype
from specdec.errors import ModelError
from specdec.models.conversion_pool import conversion_pool
from specdec.models.layout import LinearPlan, has_bias, linear_kind, linear_plans, norm_plans, plan_layout
from specdec.models.progress import Progress
from specdec.models.tensor_source import TensorSource
from specdec.models.weights_buffer import WeightsBuffer
from verify_kernels.packed_linear import TILE_N, pack_linear

SLICE_VALUES = (
    1 << 20
)  # values converted at a time: small enough to stay near the cache, large enough to amortise calls


def pack_model(source: TensorSource, dtype: WeightDtype, progress: Progress) -> WeightsBuffer:
    """Pack every tensor of ``source`` into a fresh buffer. Besides the buffer only slices are held in memory.

    Raises:
        ModelError: a tensor is missing or its shape does not fit the configuration.
    """
    check_shapes(source)
    buffer = WeightsBuffer(plan_layout(source, dtype))
    for role, _ in norm_plans(source.config):
        buffer.view(role).copy_(source.vector(role))
    jobs = _jobs(source, dtype, buffer)
    label, total, done = f"packing {source.name} ({dtype})", sum(size for size, _ in jobs), 0
    with conversion_pool() as pool:
        futures = {pool.submit(job): size for size, job in jobs}
        try:
            for future in as_completed(futures):
                future.result()
                done += futures[future]
                progress(label, done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return buffer


def check_shapes(source: TensorSource) -> None:
    """ModelError unless every tensor the configuration calls for is there with the shape it implies."""
    config = source.config
    expected: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, config.hidden_size)}
    for plan in linear_plans(config, config.tie_embeddings):
        for role, rows in plan.parts:
            expected[role] = (rows, plan.columns)
            if source.has(role + ".bias"):
                expected[role + ".bias"] = (rows,)
    expected.update((role, (size,)) for role, size in norm_plans(config))
    for role, shape in expected.items():
        found = source.shape(role)
        if found != shape:
            raise ModelError(
                f"{source.name}: tensor {role} has shape {list(found)}, the configuration calls for {list(shape)}; "
                "the file is damaged or made by an incompatible converter"
            )


def _jobs(source: TensorSource, dtype: WeightDtype, buffer: WeightsBuffer) -> list[tuple[int, Callable[[], None]]]:
    jobs: list[tuple[int, Callable[[], None]]] = []
    for plan in linear_plans(source.config, source.config.tie_embeddings):
        step = max(SLICE_VALUES // plan.columns // TILE_N, 1) * TILE_N
        bias = fused_bias(source, plan) if has_bias(plan, source) else None
        for low in range(0, plan.rows, step):
            high = min(low + step, plan.rows)
            job = _pack_job(source, plan, dtype, buffer, low, high, bias)
            jobs.append(((high - low) * plan.columns, job))
    embed, (vocab, hidden) = buffer.view("embed"), buffer.view("embed").shape
    step = max(SLICE_VALUES // hidden, 1)
    for low in range(0, vocab, step):
        high = min(low + step, vocab)
        jobs.append(((high - low) * hidden, _embed_job(source, embed, low, high)))
    return jobs


def _pack_job(
    source: TensorSource,
    plan: LinearPlan,
    dtype: WeightDtype,
    buffer: WeightsBuffer,
    low: int,
    high: int,
    bias: Tensor | None,
) -> Callable[[], None]:
    def job() -> None:
        piece = None if bias is None else bias[low:high]
        packed = pack_linear(fused_rows(source, plan, low, high), piece, linear_kind(plan.name, dtype))
        first = low // TILE_N  # slices begin on a tile, and tiles are packed independently
        buffer.view(plan.name + ".data")[first : first + packed.tiles] = packed.data
        channels = slice(first * TILE_N, (first + packed.tiles) * TILE_N)
        if packed.scale is not None:  # by tile for int4, by channel for int8
            scales = buffer.view(plan.name + ".scale")
            scales[slice(first, first + packed.tiles) if scales.ndim > 1 else channels] = packed.scale
        if packed.bias is not None:
            buffer.view(plan.name + ".bias")[channels] = packed.bias

    return job


def _embed_job(source: TensorSource, embed: Tensor, low: int, high: int) -> Callable[[], None]:
    def job() -> None:
        embed[low:high] = source.rows("embed", low, high)

    return job


def fused_rows(source: TensorSource, plan: LinearPlan, low: int, high: int) -> Tensor:
    """Rows [low, high) of the fused matrix, float32."""
    pieces, start = [], 0
    for role, count in plan.parts:
        first, last = max(low - start, 0), min(high - start, count)
        if first < last:
            pieces.append(source.rows(role, first, last))
        start += count
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def fused_bias(source: TensorSource, plan: LinearPlan) -> Tensor:
    """Its bias, float32, zeros for parts that have none."""
    pieces = [
        source.vector(role + ".bias") if source.has(role + ".bias") else torch.zeros(count)
        for role, count in plan.parts
    ]
    return torch.cat(pieces)
