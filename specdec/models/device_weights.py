"""A model's weights on a GPU: their types, linear layers over them, and reading them from a checkpoint."""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from specdec.config import DeviceDtype
from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.checkpoint import TensorSource, finite
from specdec.models.config import ModelConfig
from specdec.models.load import LoadedModel, checked_tokenizer
from specdec.models.memory import GIB
from specdec.models.pack import SLICE_VALUES, check_shapes, conversion_pool, fused_bias, fused_rows
from specdec.models.progress import Progress, silent
from specdec.models.quantized import QuantizedMatrix, QuantizedSource, group_order
from specdec.models.resolve import resolve
from specdec.models.weights import LinearPlan, ModelWeights, gather_weights, has_bias, linear_plans
from verify_kernels.backend import Prologue
from verify_kernels.gpu.act import Gate, act_mul
from verify_kernels.gpu.attention_workspace import HEAD_DIMS, TILE
from verify_kernels.gpu.kernel_launch import FP8, HALF_TYPES, supports_fp8
from verify_kernels.gpu.linear import linear
from verify_kernels.gpu.linear_int4 import linear_int4
from verify_kernels.gpu.linear_plan import DENSE_KINDS, LinearKind, LinearWorkspace
from verify_kernels.gpu.norm import norm_rows
from verify_kernels.gpu.quantize import quantize_rows
from verify_kernels.gpu.quantized_weights import (
    CHUNK,
    GROUP_SIZES,
    ROWS_AT_ONCE,
    Int4Weight,
    pack_int4,
    quantize_weight,
    stack_int4,
    unpack_int4,
)
from verify_kernels.reference.backend import gated, rms_norm


@dataclass(frozen=True, slots=True)
class LayerScratch:
    """Memory that all layers share."""

    inputs: Tensor  # a layer's rows before the product, flat, in the rows' type or float8
    scales: Tensor  # float32 [max_rows], of float8 rows
    workspace: LinearWorkspace

    def rows(self, rows: int, width: int) -> Tensor:
        """The memory of ``inputs`` as [rows, width]."""
        return self.inputs[: rows * width].view(rows, width)

    def floats8(self, rows: int, width: int) -> Tensor:
        """The memory of ``inputs`` as float8 [rows, width]."""
        return self.inputs.view(FP8)[: rows * width].view(rows, width)


class DeviceLinear(ABC):
    """out = f(x) W^T + bias + residual for n outputs of k inputs, without waiting for the device.

    residual may be out itself. Rows and bias have the model's type for rows.
    """

    nbytes: int  # of weights that one pass reads

    def __init__(
        self, n: int, k: int, bias: Tensor | None, scratch: LayerScratch, kind: LinearKind, group: int = GROUP_SIZES[-1]
    ) -> None:
        self.n, self.k, self._bias, self._scratch, self.kind, self.group = n, k, bias, scratch, kind, group

    def normed(self, x: Tensor, norm: Tensor, eps: float, out: Tensor) -> None:
        """The layer of rms(x) * norm; x [rows, k]."""
        inputs = self._scratch.rows(x.shape[0], self.k)
        norm_rows(x, norm, inputs, eps=eps)
        self.plain(inputs, out)

    def gated(self, gate_up: Tensor, gate: Gate, out: Tensor, residual: Tensor | None) -> None:
        """The layer of gate(g) * u; gate_up [rows, 2k] = [g | u]."""
        inputs = self._scratch.rows(gate_up.shape[0], self.k)
        act_mul(gate_up, inputs, gate)
        self.plain(inputs, out, residual)

    @abstractmethod
    def plain(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """The layer of x [rows, k] itself."""

    @abstractmethod
    def matrix(self, low: int, high: int) -> Tensor:
        """Outputs [low, high) of the weight, low a multiple of 64: float32 [high - low, k]."""


class DenseLinear(DeviceLinear):
    """weight: [n, k]; bias: [n] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scratch: LayerScratch) -> None:
        n, k = weight.shape
        super().__init__(n, k, bias, scratch, DENSE_KINDS[weight.dtype])
        self.weight, self.nbytes = weight, weight.nbytes

    def plain(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        linear(x, self.weight, out, workspace=self._scratch.workspace, bias=self._bias, residual=residual)

    def matrix(self, low: int, high: int) -> Tensor:
        return self.weight[low:high].float()


class Fp8Linear(DeviceLinear):
    """weight: float8 e4m3 [n, k]; scale: float32 [n]; bias: [n] or None. A norm or gate is part of the quantisation."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, scratch: LayerScratch) -> None:
        n, k = weight.shape
        super().__init__(n, k, bias, scratch, "fp8")
        self._weight, self._scale = weight, scale
        self.nbytes = weight.nbytes + scale.nbytes

    def normed(self, x: Tensor, norm: Tensor, eps: float, out: Tensor) -> None:
        self._run(x, "rms", out, None, norm, eps)

    def gated(self, gate_up: Tensor, gate: Gate, out: Tensor, residual: Tensor | None) -> None:
        self._run(gate_up, gate, out, residual)

    def plain(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        self._run(x, "none", out, residual)

    def matrix(self, low: int, high: int) -> Tensor:
        return self._weight[low:high].float() * self._scale[low:high, None]

    def _run(
        self, x: Tensor, prologue: Prologue, out: Tensor, residual: Tensor | None,
        norm: Tensor | None = None, eps: float = 0.0,
    ) -> None:  # fmt: skip
        rows, scratch = x.shape[0], self._scratch
        q, scale = scratch.floats8(rows, self.k), scratch.scales[:rows]
        quantize_rows(x, q, scale, prologue=prologue, norm=norm, eps=eps)
        linear(
            q, self._weight, out, workspace=scratch.workspace, scales=(scale, self._scale), bias=self._bias,
            residual=residual,
        )  # fmt: skip


class Int4Linear(DeviceLinear):
    """bias: [n] or None, of the rows' type."""

    def __init__(self, weight: Int4Weight, bias: Tensor | None, scratch: LayerScratch) -> None:
        super().__init__(weight.n, weight.k, bias, scratch, "int4", weight.group)
        self._weight, self.nbytes = weight, weight.nbytes

    def plain(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        linear_int4(x, self._weight, out, workspace=self._scratch.workspace, bias=self._bias, residual=residual)

    def matrix(self, low: int, high: int) -> Tensor:
        chunks = slice(low // CHUNK, -(-high // CHUNK))
        words, quants = self._weight.words[chunks], self._weight.quants[chunks]
        return unpack_int4(replace(self._weight, n=high - low, words=words, quants=quants))


class ReferenceLinear(DeviceLinear):
    """``layer`` in plain torch: the twin of its kernels, and their slow stand-in where they fail the self-test."""

    def __init__(self, layer: DeviceLinear) -> None:
        super().__init__(layer.n, layer.k, layer._bias, layer._scratch, layer.kind, layer.group)
        self._layer, self.nbytes = layer, layer.nbytes

    def normed(self, x: Tensor, norm: Tensor, eps: float, out: Tensor) -> None:
        self.plain(rms_norm(x.float(), norm.float(), eps), out)

    def gated(self, gate_up: Tensor, gate: Gate, out: Tensor, residual: Tensor | None) -> None:
        self.plain(gated(gate, *gate_up.float().chunk(2, dim=1)), out, residual)

    def plain(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        for low in range(0, self.n, ROWS_AT_ONCE):
            part = slice(low, min(low + ROWS_AT_ONCE, self.n))
            y = x.float() @ self.matrix(part.start, part.stop).t()
            if self._bias is not None:
                y += self._bias[part].float()
            out[:, part] = y if residual is None else y + residual[:, part].float()

    def matrix(self, low: int, high: int) -> Tensor:
        return self._layer.matrix(low, high)


logger = logging.getLogger(__name__)

FP8_CAPABILITY = (9, 0)  # the least CUDA compute capability with fp8 products
WAY_OUT = "run the model on the CPU, or use one of 4 bits in groups of 32, 64 or 128"


@dataclass(frozen=True, slots=True)
class DeviceTypes:
    """The types of a model's values on a GPU."""

    name: str  # of the layers' matrices, for people
    rows: torch.dtype  # of activations, the KV pool, norms, embedding and output matrix
    fp8: bool  # the layers' matrices are float8 e4m3; otherwise those that the checkpoint holds in 4 bits stay so

    @staticmethod
    def of(dtype: DeviceDtype) -> DeviceTypes:
        """The types for the setting ``dtype``."""
        name = "bf16" if dtype == "auto" else dtype
        rows = torch.float16 if dtype == "fp16" else torch.bfloat16
        return DeviceTypes(name, rows, fp8=dtype == "fp8")


DeviceModel = LoadedModel[DeviceLinear]


def load_device_model(
    ref: str,
    *,
    dtype: DeviceDtype,
    cache_dir: Path,
    device: torch.device,
    max_rows: int,
    progress: Progress | None = None,
) -> DeviceModel:
    """Load the model ``ref``, like `specdec.models.load.load_model`, for forwards of up to ``max_rows`` rows.

    Raises:
        ModelError: not found, truncated, corrupt, without tokenizer, or too large for the device's memory.
        UnsupportedModelError: the architecture or a tensor type is not supported on the device.
    """
    progress = progress or silent
    checkpoint = resolve(ref, cache_dir, progress)
    source, types = checkpoint.open(), DeviceTypes.of(dtype)
    if types.fp8 and device.type == "cuda" and not supports_fp8(device, FP8_CAPABILITY):
        raise ModelError("engine.device_dtype: this GPU has no products of float8 e4m3; set it to bf16 or fp16")
    check_heads(checkpoint.name, source.config)
    check_shapes(source)
    _check_memory(source, types, device)
    weights = WeightsReader(source, types, device, max_rows, progress).read()
    tokenizer = checked_tokenizer(checkpoint, source.config, cache_dir)
    held = "int4" if _stays_int4(source, types) else types.name
    digest = hashlib.sha256(f"{checkpoint.fingerprint()}|{types.name}|{held}".encode()).hexdigest()
    return LoadedModel(checkpoint.name, source.config, held, weights, tokenizer, digest)


def check_heads(name: str, config: ModelConfig) -> None:
    """UnsupportedModelError unless the attention kernels support the heads, or if layers consist of experts."""
    if config.experts:
        raise UnsupportedModelError(f"{name}: a mixture of experts runs on a CPU only; set engine.device to `cpu`")
    group = config.n_heads // config.n_kv_heads
    if config.head_dim not in HEAD_DIMS or config.n_heads % config.n_kv_heads or group > TILE:
        sizes = ", ".join(map(str, HEAD_DIMS))
        raise UnsupportedModelError(
            f"{name}: {config.n_heads} heads of {config.head_dim} over {config.n_kv_heads} KV heads do not run on a "
            f"GPU; heads must be {sizes} wide and a multiple of the KV heads; set engine.device to cpu"
        )


def _stays_int4(source: TensorSource, types: DeviceTypes) -> TypeGuard[QuantizedSource]:
    """Whether matrices of the checkpoint stay in its 4 bits. Those of 8 bits are held in the rows' type."""
    return not types.fp8 and isinstance(source, QuantizedSource) and source.quantized.bits == 4


def _check_memory(source: TensorSource, types: DeviceTypes, device: torch.device) -> None:
    """ModelError if the weights exceed the free memory."""
    if device.type != "cuda":
        return
    config = source.config
    plans = [plan for plan in linear_plans(config) if plan.name != "lm_head"]
    ends = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    need = sum(plan.rows * plan.columns * _weight_bytes(plan, source, types) for plan in plans)
    need += ends * types.rows.itemsize
    free, _ = torch.cuda.mem_get_info(device)
    if need > free:
        ways = "" if types.fp8 or _stays_int4(source, types) else "set engine.device_dtype to fp8, "
        raise ModelError(
            f"{source.name}: its weights need {need / GIB:.1f} GiB of the device, {free / GIB:.1f} GiB are free; "
            f"{ways}use a smaller or quantised model, or set engine.device to cpu"
        )


def _weight_bytes(plan: LinearPlan, source: TensorSource, types: DeviceTypes) -> float:
    """Bytes of each weight of a layer on the device."""
    if _stays_int4(source, types) and _runs_as_one(plan, source):
        group = min(source.group_size(plan.columns), GROUP_SIZES[-1])
        return 1 / 2 + 4 / group  # and its share of a scale with a zero point
    return 1 if types.fp8 else types.rows.itemsize


def _runs_as_one(plan: LinearPlan, source: QuantizedSource) -> bool:
    """Whether the parts of a layer are all quantised, and `stack_int4` can fuse them if their scales have one type."""
    if not all(source.is_quantized(role) for role, _ in plan.parts):
        return False
    first, *others = (source.groups(role) for role, _ in plan.parts)
    whole_chunks = all(rows % CHUNK == 0 for _, rows in plan.parts[:-1])
    return whole_chunks and all(torch.equal(first, other) for other in others)


class WeightsReader:
    """Reads a model's weights onto a GPU. max_rows: of a forward; it sizes the layers' scratch."""

    def __init__(
        self, source: TensorSource, types: DeviceTypes, device: torch.device, max_rows: int, progress: Progress
    ) -> None:
        self._source, self._types, self._device, self._progress = source, types, device, progress
        self._plans = linear_plans(source.config)
        self._scratch = self._make_scratch(max_rows)

    def read(self) -> ModelWeights[DeviceLinear]:
        """All weights.

        Raises:
            ModelError: a tensor is missing or damaged, or holds no numbers.
            UnsupportedModelError: the kernel does not support the form of 4-bit matrices.
        """
        config = self._source.config
        embed = self._dense(LinearPlan("embed", (("embed", config.vocab_size),), config.hidden_size))
        done, total = 0, sum(plan.rows * plan.columns for plan in self._plans)

        def linear(plan: LinearPlan) -> DeviceLinear:
            nonlocal done
            if plan.name != "lm_head":
                layer = self._linear(plan)
            else:
                layer = DenseLinear(embed if config.tie_embeddings else self._dense(plan), None, self._scratch)
            done += plan.rows * plan.columns
            self._progress(f"loading {self._source.name}", done, total)
            return layer

        return gather_weights(config, embed, linear, self._vector)

    def _linear(self, plan: LinearPlan) -> DeviceLinear:
        bias = (
            fused_bias(self._source, plan).to(self._device, self._types.rows) if has_bias(plan, self._source) else None
        )
        packed = self._int4(plan)
        if packed is not None:
            return Int4Linear(packed, bias, self._scratch)
        dense = self._dense(plan)
        if self._types.fp8:
            return Fp8Linear(*quantize_weight(dense), bias, self._scratch)
        return DenseLinear(dense, bias, self._scratch)

    def _int4(self, plan: LinearPlan) -> Int4Weight | None:
        """The layer in 4 bits; None if the checkpoint holds it otherwise, or in parts that cannot run as one."""
        source = self._source
        if not _stays_int4(source, self._types) or not all(source.is_quantized(role) for role, _ in plan.parts):
            return None
        parts = [read_int4(source, role) for role, _ in plan.parts] if _runs_as_one(plan, source) else []
        if len({part.scale_type for part in parts}) != 1:
            why = "differ in the order of their inputs or the type of their scales, or outputs are no multiple of"
            logger.warning("%s: %s is held in 16 bits: its matrices %s %d", source.name, plan.name, why, CHUNK)
            return None
        return stack_int4(parts).to(self._device)

    def _dense(self, plan: LinearPlan) -> Tensor:
        """The fused matrix in the rows' type, converted a slice at a time on a few threads."""
        out = torch.empty(plan.rows, plan.columns, dtype=self._types.rows, device=self._device)
        step = max(SLICE_VALUES // plan.columns, 1)

        def convert(low: int) -> None:
            high = min(low + step, plan.rows)
            rows = fused_rows(self._source.rows, plan, low, high)
            out[low:high] = finite(self._source.name, plan.name, rows.to(out.dtype))

        with conversion_pool() as pool:
            list(pool.map(convert, range(0, plan.rows, step)))
        return out

    def _vector(self, role: str) -> Tensor:
        return finite(self._source.name, role, self._source.vector(role).to(self._types.rows)).to(self._device)

    def _make_scratch(self, max_rows: int) -> LayerScratch:
        config, rows = self._source.config, self._types.rows
        int4 = _stays_int4(self._source, self._types)
        forms: list[tuple[LinearKind, int]] = [(DENSE_KINDS[rows], GROUP_SIZES[-1])]
        forms += [("fp8", GROUP_SIZES[-1])] if self._types.fp8 else []
        forms += [("int4", group) for group in GROUP_SIZES] if int4 else []
        shapes = {(plan.rows, plan.columns) for plan in self._plans}
        layers = [(n, k, kind, group) for n, k in shapes for kind, group in forms]
        widest = max(config.hidden_size, config.q_size, config.intermediate_size)
        return LayerScratch(
            torch.zeros(max_rows * widest, dtype=rows, device=self._device),
            torch.zeros(max_rows, dtype=torch.float32, device=self._device),
            LinearWorkspace.for_layers(layers, max_rows, self._device, permuted=rows if int4 else None),
        )


def read_int4(source: QuantizedSource, role: str) -> Int4Weight:
    """Quantised matrix ``role``, packed for `verify_kernels.gpu.linear_int4`; `stack_int4` fuses several.

    Groups larger than the kernel's repeat their scales. Input channels with an order of their own (act-order) are
    sorted by group here; the weight holds the order.

    Raises:
        ModelError: a tensor is missing, damaged or does not fit the others' shapes.
        UnsupportedModelError: the kernel does not support it: not 4 bits, or groups too small or of unequal sizes.
    """
    where = f"{source.name}: {role}"
    if source.quantized.bits != 4:
        raise UnsupportedModelError(f"{where}: bits is {source.quantized.bits}; the GPU kernel reads 4, {WAY_OUT}")
    outputs, inputs = source.shape(role)
    matrix = source.matrix(role, 0, outputs)
    size = source.group_size(inputs)
    try:
        perm = group_order(matrix.groups, size)
    except ValueError as error:
        raise UnsupportedModelError(f"{where}: {error}; {WAY_OUT}") from None
    levels = matrix.levels if perm is None else matrix.levels[:, perm]
    group = next((g for g in reversed(GROUP_SIZES) if size % g == 0), None)
    if group is None and size == inputs:
        group = GROUP_SIZES[-1]  # one group: its last part may be short
    if group is None:
        raise UnsupportedModelError(f"{where}: group_size is {size}; the GPU kernel cannot split it, {WAY_OUT}")
    scales, zeros = _scales(matrix, size, group, inputs)
    return pack_int4(levels, finite(source.name, role, scales), zeros, group, perm)


def _scales(matrix: QuantizedMatrix, size: int, group: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Scales and zero points of groups of ``group`` input channels."""
    scales = matrix.scales if matrix.scales.dtype in HALF_TYPES else matrix.scales.half()
    of_group = torch.arange(0, inputs, group) // size
    return scales[:, of_group], matrix.zeros.to(torch.uint8)[:, of_group]
