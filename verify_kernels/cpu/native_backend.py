"""The native CPU kernels behind the `Backend` and `SamplingKernels` protocols, bound by ctypes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verify_kernels.backend import AttentionSpec, BoundLayers, ExpertsSpec, LayerSpec, LinearSpec, linear_parts
from verify_kernels.forward_batch import ForwardBatch
from verify_kernels.packed_weights import CHUNK_K, FITS, DraftKind, Embedding, PackedLinear
from verify_kernels.quant_formats import FORMATS, GROUP
from verify_kernels.sampling import NO_TOKEN, Logprobs, RowSampling, Tokens


class LinearArgs(ctypes.Structure):
    """``sd_linear_args`` in csrc/linear.h."""

    _fields_ = (
        ("kind", c_int32), ("pre", c_int32), ("post", c_int32), ("threads", c_int32),
        ("n", c_int32), ("k", c_int32), ("k_pad", c_int32), ("tiles", c_int32),
        ("ld_src", c_int64), ("ld_dst", c_int64),
        ("weight", c_void_p), ("weight_scale", c_void_p), ("bias", c_void_p), ("order", c_void_p),
        ("src", c_void_p), ("dst", c_void_p), ("pre_norm", c_void_p), ("post_norm", c_void_p),
        ("eps", c_float),
        ("x", c_void_p), ("q", c_void_p), ("q_scale", c_void_p), ("q_sum", c_void_p), ("result", c_void_p),
    )  # fmt: skip


class ExpertsArgs(ctypes.Structure):
    """``sd_experts_args`` in csrc/experts.cpp."""

    _fields_ = (
        ("gate_up", ctypes.POINTER(LinearArgs)), ("down", ctypes.POINTER(LinearArgs)),
        ("gate_up_bytes", c_int64), ("down_bytes", c_int64),
        ("experts", c_int32), ("chosen", c_int32), ("normalise", c_int32), ("threads", c_int32),
        ("scores", c_void_p), ("x", c_void_p), ("ld_x", c_int64),
        ("expert", c_void_p), ("share", c_void_p), ("place", c_void_p), ("row", c_void_p), ("start", c_void_p),
    )  # fmt: skip


class AttentionArgs(ctypes.Structure):
    """``sd_attention_args`` in csrc/attention.h."""

    _fields_ = (
        ("n_heads", c_int32), ("n_kv_heads", c_int32), ("head_dim", c_int32), ("window", c_int32),
        ("threads", c_int32), ("kv_bytes", c_int32), ("scale", c_float), ("eps", c_float),
        ("q_norm", c_void_p), ("k_norm", c_void_p), ("cos", c_void_p), ("sin", c_void_p),
        ("qkv", c_void_p), ("q", c_void_p), ("out", c_void_p), ("k_pool", c_void_p), ("v_pool", c_void_p),
        ("k_scale", c_void_p), ("v_scale", c_void_p),
    )  # fmt: skip


class BatchArgs(ctypes.Structure):
    """``sd_batch`` in csrc/attention.h."""

    _fields_ = (
        ("rows", c_int32), ("entries", c_int32), ("max_pages", c_int32),
        ("entry_start", c_void_p), ("entry_ctx", c_void_p), ("page_table", c_void_p), ("entry_of", c_void_p),
        ("parent", c_void_p), ("depth", c_void_p), ("diverge", c_void_p),
    )  # fmt: skip


class LayerRecord(ctypes.Structure):
    """``sd_layer`` in csrc/run.cpp."""

    _fields_ = (("kind", c_int64), ("args", c_void_p))


_LAYERS: dict[type[ctypes.Structure], int] = {LinearArgs: 0, ExpertsArgs: 1, AttentionArgs: 2}
RECORD_BYTES = 384  # the most that 256 quantised inputs of a row take with scales and sums (csrc/quant_rows.h)
_KINDS = {name: i for i, name in enumerate(("int8", "bf16", "fp32", *FORMATS))}
_CHANNELS_PER_GROUP = {"int8": 4} | {name: f.unit for name, f in FORMATS.items()}  # of data's dimension 1
_PROLOGUES = {"none": 0, "rms": 1, "silu": 2, "gelu": 3}
_EPILOGUES = {"store": 0, "add": 1, "norm_add": 2}


class NativeBackend:
    """C++ kernels. Layers that are bound together run in one call; their records and buffers are made once.

    ``library`` is what `load_library` returned.
    """

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library, self._threads = library, threads
        self._batch: tuple[ForwardBatch, BatchArgs] | None = None

    def reserve(self, max_rows: int, max_width: int, max_heads_width: int) -> None:
        """Allocate scratch shared by every bound layer (layers run one after the other)."""
        wide = -(-max_width // 128) * 128  # a unit of a block format that fits in part
        self._x = torch.zeros(max_rows, wide)
        chunks = -(-max_width // CHUNK_K)
        self._q = torch.zeros(max_rows, chunks * RECORD_BYTES, dtype=torch.int8)
        self._q_scale = torch.zeros(max_rows, chunks)
        self._q_sum = torch.zeros(max_rows, chunks, dtype=torch.int32)
        self._result = torch.zeros(max_rows, wide)
        self._heads = torch.zeros(max_rows, max_heads_width)

    def bind(self, *layers: LayerSpec) -> BoundLayers:
        """See `Backend`."""
        bound = [record for layer in layers for record in self._bind(layer)]
        records = (LayerRecord * len(bound))(
            *[LayerRecord(_LAYERS[type(args)], ctypes.addressof(args)) for args, _ in bound]
        )
        run, count = self._library.sd_run, len(bound)

        def op(rows: int, batch: ForwardBatch | None = None, _keep: object = (self, layers, bound)) -> None:
            run(records, count, rows, None if batch is None else ctypes.byref(self._batch_args(batch)))

        return op

    def _bind(self, layer: LayerSpec) -> Iterator[tuple[ctypes.Structure, object]]:
        """The records of a layer, each with what it points to."""
        if isinstance(layer, LinearSpec):
            yield from ((self._linear_args(spec, weight), spec) for spec, weight in linear_parts(layer))
        elif isinstance(layer, ExpertsSpec):
            yield self._experts_args(layer)
        else:
            yield self._attention_args(layer), layer

    def _experts_args(self, spec: ExpertsSpec) -> tuple[ExpertsArgs, object]:
        up, down = (weight.part(0, spec.experts) for weight in (spec.gate_up, spec.down))
        normed = LinearSpec(up, spec.x, spec.gated, "rms", pre_norm=spec.norm, eps=spec.eps)
        gate_up_args = self._linear_args(normed, up)
        down_args = self._linear_args(LinearSpec(down, spec.gated, spec.out, spec.activation), down)
        pairs = len(spec.x) * spec.chosen
        if min(len(spec.gated), len(spec.out), len(self._q)) < pairs:
            raise ValueError(f"experts: scratch and reserved rows must hold {pairs} pairs of rows and experts")
        _need("scores", spec.scores, spec.experts)
        expert, place, row = (torch.zeros(pairs, dtype=torch.int32) for _ in range(3))
        share, start = torch.zeros(pairs), torch.zeros(spec.experts + 1, dtype=torch.int32)
        args = ExpertsArgs(
            gate_up=ctypes.pointer(gate_up_args), down=ctypes.pointer(down_args),
            gate_up_bytes=spec.gate_up.nbytes // spec.experts, down_bytes=spec.down.nbytes // spec.experts,
            experts=spec.experts, chosen=spec.chosen, normalise=spec.normalise, threads=self._threads,
            scores=spec.scores.data_ptr(), x=spec.x.data_ptr(), ld_x=spec.x.stride(0), expert=expert.data_ptr(),
            share=share.data_ptr(), place=place.data_ptr(), row=row.data_ptr(), start=start.data_ptr(),
        )  # fmt: skip
        return args, (expert, share, place, row, start)

    def _linear_args(self, spec: LinearSpec, weight: PackedLinear) -> LinearArgs:
        width = weight.k * (2 if spec.prologue in ("silu", "gelu") else 1)
        _need("src", spec.src, width)
        _need("dst", spec.dst, weight.n)
        if weight.k > self._x.shape[1] or (spec.epilogue == "norm_add" and weight.n > self._result.shape[1]):
            raise ValueError(f"weight: {weight.n} x {weight.k} exceeds the reserved scratch")
        k_pad = _padded(weight)
        return LinearArgs(
            kind=_KINDS[weight.kind], pre=_PROLOGUES[spec.prologue], post=_EPILOGUES[spec.epilogue],
            threads=self._threads, n=weight.n, k=weight.k, k_pad=k_pad, tiles=weight.tiles,
            ld_src=spec.src.stride(0), ld_dst=spec.dst.stride(0),
            weight=weight.data.data_ptr(), weight_scale=_pointer(weight.scale),
            bias=_pointer(weight.bias), order=_pointer(weight.order), src=spec.src.data_ptr(), dst=spec.dst.data_ptr(),
            pre_norm=_pointer(spec.pre_norm), post_norm=_pointer(spec.post_norm), eps=spec.eps,
            x=self._x.data_ptr(), q=self._q.data_ptr(), q_scale=self._q_scale.data_ptr(),
            q_sum=self._q_sum.data_ptr(), result=self._result.data_ptr(),
        )  # fmt: skip

    def _attention_args(self, spec: AttentionSpec) -> AttentionArgs:
        _need("qkv", spec.qkv, (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim)
        _need("out", spec.out, spec.n_heads * spec.head_dim)
        return AttentionArgs(
            n_heads=spec.n_heads, n_kv_heads=spec.n_kv_heads, head_dim=spec.head_dim, window=spec.window,
            threads=self._threads, kv_bytes=spec.kv.k.dtype.itemsize, scale=spec.scale, eps=spec.eps,
            q_norm=_pointer(spec.q_norm), k_norm=_pointer(spec.k_norm),
            cos=spec.cos.data_ptr(), sin=spec.sin.data_ptr(), qkv=spec.qkv.data_ptr(), q=self._heads.data_ptr(),
            out=spec.out.data_ptr(), k_pool=spec.kv.k.data_ptr(), v_pool=spec.kv.v.data_ptr(),
            k_scale=_pointer(spec.kv.k_scale), v_scale=_pointer(spec.kv.v_scale),
        )  # fmt: skip

    def _batch_args(self, batch: ForwardBatch) -> BatchArgs:
        if self._batch is None or self._batch[0] is not batch:  # converted once for all runs of layers
            args = BatchArgs(
                rows=batch.rows, entries=batch.entry_ctx.shape[0], max_pages=batch.page_table.shape[1],
                entry_start=batch.entry_start.ctypes.data, entry_ctx=batch.entry_ctx.ctypes.data,
                page_table=batch.page_table.ctypes.data, entry_of=batch.entry_of.ctypes.data,
                parent=batch.parent.ctypes.data, depth=batch.depth.ctypes.data, diverge=batch.diverge.ctypes.data,
            )  # fmt: skip
            self._batch = (batch, args)
        return self._batch[1]

    def embed(self, table: Embedding, tokens: NDArray[np.int32], scale: float, out: Tensor) -> None:
        if isinstance(table, PackedLinear):
            kind, k_pad, ids, count = _KINDS[table.kind], _padded(table), tokens.ctypes.data, len(tokens)
            self._library.sd_embed_blocks(
                kind, table.data.data_ptr(), table.k, k_pad, ids, count, scale, out.data_ptr()
            )
        else:
            np.multiply(table.numpy()[tokens], np.float32(scale), out=out.numpy()[: len(tokens)], dtype=np.float32)


def _padded(weight: PackedLinear) -> int:
    """Inputs of a packed matrix, with those that fill its last unit up."""
    return weight.data.shape[1] * _CHANNELS_PER_GROUP.get(weight.kind, 1)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _need(name: str, tensor: Tensor, width: int) -> None:
    if tensor.dtype != torch.float32 or tensor.ndim != 2 or tensor.shape[1] < width or tensor.stride(1) != 1:
        raise ValueError(f"{name}: must be float32 [rows, >= {width}], got {tensor.dtype} {tuple(tensor.shape)}")


_PLACE = struct.Struct("<qii")  # position, first pair of the path, pairs
_NO_EDITS = bytes(72)  # the edits of a row of sampling_view.h that has none


class NativeSampling:
    """C++ kernels of `csrc/sampling.cpp`; ``library`` is what `load_library` returned. ``threads`` share the rows.

    Rows are packed into one contiguous array per call; arrays they point to live in their `SequenceEdits`, which the
    caller's rows keep alive for the call.
    """

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library, self._threads = library, threads

    def sample(self, logits: Tensor, rows: Sequence[RowSampling]) -> Tokens:
        tokens = np.empty(len(rows), np.int32)
        records, path = _pack(rows)
        self._library.sd_sample_rows(*self._where(logits), records, path.ctypes.data, tokens.ctypes.data)
        return tokens

    def children(self, logits: Tensor, rows: Sequence[RowSampling], width: int) -> tuple[Tokens, Logprobs]:
        ids, values = np.empty((len(rows), width), np.int32), np.empty((len(rows), width))
        records, path = _pack(rows)
        self._library.sd_sample_children(
            *self._where(logits), records, path.ctypes.data, width, ids.ctypes.data, values.ctypes.data
        )
        return ids, values

    def logprobs(self, logits: Tensor, tokens: Tokens, top: int) -> tuple[Logprobs, Tokens, Logprobs]:
        tokens = np.ascontiguousarray(tokens, np.int32)
        chosen = np.empty(len(tokens))
        ids, values = np.full((len(tokens), top), NO_TOKEN, np.int32), np.empty((len(tokens), top))
        self._library.sd_sample_logprobs(
            *self._where(logits), tokens.ctypes.data, top, chosen.ctypes.data, ids.ctypes.data, values.ctypes.data
        )
        return chosen, ids, values

    def _where(self, logits: Tensor) -> tuple[int, int, int, int, int]:
        return logits.data_ptr(), logits.stride(0), logits.shape[0], logits.shape[1], self._threads


def _pack(rows: Sequence[RowSampling]) -> tuple[bytes, NDArray[np.int32]]:
    parts: list[bytes] = []
    path: list[int] = []
    for row in rows:
        parts.append(row.policy.record)
        parts.append(_PLACE.pack(row.position, len(path) // 2, len(row.path) // 2))
        parts.append(_NO_EDITS if row.edits is None else row.edits.record(row.ban, row.mask))
        path.extend(row.path)
    return b"".join(parts), np.asarray(path, np.int32)


def native_round_blocks(library: ctypes.CDLL, weight: Tensor, kind: DraftKind) -> Tensor:
    """As `packed_weights.round_blocks`, of which sums may be added in another order, by ``library``, which is what
    `load_library` returned. Threads that call it run at once."""
    weight, fits, size = weight.contiguous(), torch.tensor(FITS[kind]), FORMATS[kind].block_bytes
    groups = weight.numel() // GROUP
    raw = torch.empty(weight.shape[0], weight.shape[1] // GROUP * size, dtype=torch.uint8)
    library.sd_round_blocks(_KINDS[kind], size, weight.data_ptr(), groups, fits.data_ptr(), len(fits), raw.data_ptr())
    return raw
