"""Every launcher called as an engine would call it, on the shapes of real models, on any device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from specdec.models.config import ModelConfig
from specdec.models.random_model import RANDOM_SHAPES
from verify_kernels.gpu import sampling
from verify_kernels.gpu.accept import AcceptResult, accept
from verify_kernels.gpu.act import act_mul
from verify_kernels.gpu.attention_plan import attention_plan
from verify_kernels.gpu.attention_workspace import AttentionWorkspace
from verify_kernels.gpu.kernel_launch import FP8, StepRows
from verify_kernels.gpu.kv_ops import move_kv, write_kv
from verify_kernels.gpu.linear import linear
from verify_kernels.gpu.linear_int4 import linear_int4
from verify_kernels.gpu.linear_plan import LinearKind, LinearWorkspace, block_k_of
from verify_kernels.gpu.norm import norm_rows
from verify_kernels.gpu.quantize import quantize_rows
from verify_kernels.gpu.quantized_weights import CHUNK, Int4Weight
from verify_kernels.gpu.sampling_table import SamplingNeeds, SamplingPlan, SamplingTable, SamplingWorkspace
from verify_kernels.gpu.tree_attention import tree_attention

SHAPES = [shape for name, shape in RANDOM_SHAPES.items() if name != "tiny"]
ROWS = (1, 8, 16, 33, 64, 200, 512)
Launch = Callable[[torch.device], None]


class _Maker:
    """Tensors of one device and type."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def ints(self, *shape: int) -> Tensor:
        return self(*shape, dtype=torch.int32)

    def floats(self, *shape: int) -> Tensor:
        return self(*shape, dtype=torch.float32)


def _makers(device: torch.device) -> Iterator[_Maker]:
    yield from (_Maker(device, dtype) for dtype in (torch.bfloat16, torch.float16))


def _rows(device: torch.device) -> None:
    for make in _makers(device):
        for shape in SHAPES:
            hidden = shape.hidden_size
            for adds in (False, True):
                norm_rows(make(8, hidden), make(hidden), make(8, hidden), eps=1e-6, adds=adds)


def _act(device: torch.device) -> None:
    for make in _makers(device):
        for shape in SHAPES:
            width = shape.intermediate_size
            act_mul(make(8, 2 * width), make(8, width), "silu")
            act_mul(make(8, 2 * width), make(8, width), "gelu")


def _quantize(device: torch.device) -> None:
    for make in _makers(device):
        for shape in SHAPES:
            for k in (shape.hidden_size, shape.intermediate_size):
                q, scale = make(8, k, dtype=FP8), make.floats(8)
                quantize_rows(make(8, k), q, scale)
                quantize_rows(make(8, k), q, scale, prologue="rms", norm=make(k), eps=1e-6)
                quantize_rows(make(8, 2 * k), q, scale, prologue="silu")
                quantize_rows(make(8, 2 * k), q, scale, prologue="gelu")


def _layers() -> list[tuple[int, int]]:
    """Output and input width of every linear layer of the models."""
    found = []
    for shape in SHAPES:
        hidden, ffn, q, kv = shape.hidden_size, shape.intermediate_size, shape.q_size, shape.kv_size
        found += [(q + 2 * kv, hidden), (hidden, q), (2 * ffn, hidden), (hidden, ffn), (shape.vocab_size, hidden)]
    return sorted(set(found))


def _linear(device: torch.device) -> None:
    for make, kind in zip(_makers(device), ("bf16", "fp16"), strict=True):
        for n, k in _layers():
            weight, bias, workspace = make(n, k), make(n), _workspace(n, k, kind, device)
            for rows in ROWS:
                linear(make(rows, k), weight, make(rows, n), workspace=workspace)
                linear(make(rows, k), weight, make(rows, n), workspace=workspace, bias=bias, residual=make(rows, n))
    _linear_fp8(device)


def _linear_fp8(device: torch.device) -> None:
    for make in _makers(device):
        for n, k in _layers():
            weight, scale, bias, workspace = (
                make(n, k, dtype=FP8),
                make.floats(n),
                make(n),
                _workspace(n, k, "fp8", device),
            )
            for rows in ROWS:
                x, x_scale, out = make(rows, k, dtype=FP8), make.floats(rows), make(rows, n)
                linear(x, weight, out, workspace=workspace, scales=(x_scale, scale))
                linear(x, weight, out, workspace=workspace, scales=(x_scale, scale), bias=bias, residual=out)


def _linear_int4(device: torch.device) -> None:
    bf16, fp16 = _makers(device)
    for make, scale_type, groups in (
        (bf16, torch.float16, (32, 64, 128)), (bf16, torch.bfloat16, (128,)), (fp16, torch.float16, (128,))
    ):  # fmt: skip
        for n, k in _layers()[:-1]:
            for group in groups:
                block, chunks = block_k_of("int4", group), -(-n // CHUNK)
                words = make(chunks, -(-k // block), CHUNK, block // 4, dtype=torch.int16)
                quants = make.ints(chunks, -(-k // block), block // group, CHUNK)
                weight = Int4Weight(n, k, group, words, quants, scale_type, None)
                workspace = _workspace(n, k, "int4", device, group)
                for rows in ROWS:
                    linear_int4(make(rows, k), weight, make(rows, n), workspace=workspace)
                weight = replace(weight, perm=make.ints(k).zero_())
                workspace = LinearWorkspace.for_layers([(n, k, "int4", group)], 1, device, permuted=make.dtype)
                linear_int4(make(1, k), weight, make(1, n), workspace=workspace)


def _workspace(n: int, k: int, kind: LinearKind, device: torch.device, group: int = 128) -> LinearWorkspace:
    return LinearWorkspace.for_layers([(n, k, kind, group)], max(ROWS), device)


def _step(make: _Maker, entries: int, rows: int, pages: int) -> StepRows:
    return StepRows(
        entry_of=make.ints(rows), entry_start=make.ints(entries + 1), entry_ctx=make.ints(entries),
        parent=make.ints(rows), depth=make.ints(rows), page_table=make.ints(entries, pages),
    )  # fmt: skip


def _kv(device: torch.device) -> None:
    for make in _makers(device):
        for shape in SHAPES:
            heads, kv_heads, d, entries, rows, pages = shape.n_heads, shape.n_kv_heads, shape.head_dim, 3, 40, 64
            step = _step(make, entries, rows, 16)
            qkv, q = make(rows, (heads + 2 * kv_heads) * d), make(rows, heads, d)
            angles = make.floats(4096, d // 2), make.floats(4096, d // 2)
            norms = {"q_norm": make(d), "k_norm": make(d), "eps": 1e-6}
            for pool_type in (None, FP8):
                pools = [make(pages, kv_heads, 64, d, dtype=pool_type) for _ in range(2)]
                write_kv(qkv, q, *pools, *angles, step)
                write_kv(qkv, q, *pools, *angles, step, **norms)
                layers = [make(shape.n_layers, pages, kv_heads, 64, d, dtype=pool_type) for _ in range(2)]
                move_kv(*layers, make.ints(entries, 8), make.ints(entries, 8), make.ints(entries))


def _attention(device: torch.device) -> None:
    for make in _makers(device):
        for shape in SHAPES:
            for pool_type in (None, FP8):
                _attend(make, shape, pool_type)


def _attend(make: _Maker, shape: ModelConfig, pool_type: torch.dtype | None) -> None:
    heads, kv_heads, d, pages = shape.n_heads, shape.n_kv_heads, shape.head_dim, 64
    pools = [make(pages, kv_heads, 64, d, dtype=pool_type) for _ in range(2)]
    workspace = AttentionWorkspace.allocate(
        heads=heads, kv_heads=kv_heads, head_dim=d, kv_dtype=pools[0].dtype, max_rows=512, max_entries=32,
        max_pages=64, device=make.device,
    )  # fmt: skip
    for entries, rows in ((1, 1), (1, 16), (3, 40), (8, 128), (32, 32), (2, 512)):
        step = _step(make, entries, rows, 64)
        attention_plan(step, workspace)
        for window in (0, 4096):
            q, out = make(rows, heads, d), make(rows, heads, d)
            tree_attention(q, *pools, out, step, workspace, scale=d**-0.5, window=window)


def _trees(device: torch.device) -> None:
    make, entries, rows = _Maker(device, torch.float32), 3, 40
    step, roots, tokens = _step(make, entries, rows, 16), make.ints(entries), make.ints(rows)
    result = AcceptResult.allocate(entries, 63, device)
    accept(step, roots, tokens, make.ints(20), make.ints(entries), result, n_pages=64)


def _sampling(device: torch.device) -> None:
    make, rows = _Maker(device, torch.float32), 8
    for vocab in sorted({shape.vocab_size for shape in RANDOM_SHAPES.values()}):
        logits, ids, best = make(rows, vocab), make.ints(rows), (make.ints(rows, 4), make(rows, 4, dtype=torch.float64))
        workspace = SamplingWorkspace.allocate(rows, SamplingPlan.of(vocab), device)
        words = SamplingTable.words(rows) + 16384
        buffers = [torch.zeros(words, dtype=torch.int32, device=place) for place in (device, "cpu")]
        table = SamplingTable.within(rows, *buffers, make(64))
        for flags in itertools.product((False, True), repeat=4):
            needs = SamplingNeeds(*flags)
            sampling.sample(logits, table, needs, workspace, ids)
            sampling.children(logits, table, needs, workspace, *best)
        sampling.logprobs(logits, ids, workspace, make(rows, dtype=torch.float64), *best)


# Launchers by "module.function"
ENGINE_LAUNCHES: dict[str, Launch] = {
    "accept.accept": _trees,
    "act.act_mul": _act,
    "attention_plan.attention_plan": _attention,
    "kv_ops.move_kv": _kv,
    "kv_ops.write_kv": _kv,
    "linear.linear": _linear,
    "linear_int4.linear_int4": _linear_int4,
    "norm.norm_rows": _rows,
    "quantize.quantize_rows": _quantize,
    "sampling.children": _sampling,
    "sampling.logprobs": _sampling,
    "sampling.sample": _sampling,
    "tree_attention.tree_attention": _attention,
}
