"""Reads a checkpoint's tensors onto a GPU, layer by layer."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from specdec.models.conversion_pool import conversion_pool
from specdec.models.device.dense_linear import DenseLinear
from specdec.models.device.device_layer import DeviceLayer
from specdec.models.device.device_linear import DeviceLinear
from specdec.models.device.device_types import DeviceTypes
from specdec.models.device.device_weights import DeviceWeights
from specdec.models.device.fp8_linear import Fp8Linear
from specdec.models.device.int4_linear import Int4Linear
from specdec.models.device.layer_scratch import LayerScratch
from specdec.models.layout import LinearPlan, has_bias, linear_plans
from specdec.models.pack_model import SLICE_VALUES, fused_bias, fused_rows
from specdec.models.progress import Progress
from specdec.models.quantized_int4 import read_int4
from specdec.models.quantized_source import QuantizedSource
from specdec.models.tensor_source import TensorSource
from verify_kernels.gpu.linear_int4_weight import GROUP_SIZES, Int4Weight, stack_int4
from verify_kernels.gpu.linear_tiles import LinearKind
from verify_kernels.gpu.linear_workspace import LinearWorkspace
from verify_kernels.gpu.quantize_weight import quantize_weight

logger = logging.getLogger(__name__)
KINDS: dict[torch.dtype, LinearKind] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class WeightsReader:
    """``max_rows``: of a forward, which sizes the layers' scratch."""

    def __init__(
        self, source: TensorSource, types: DeviceTypes, device: torch.device, max_rows: int, progress: Progress
    ) -> None:
        self._source, self._types, self._device, self._progress = source, types, device, progress
        self._plans = {plan.name: plan for plan in linear_plans(source.config, source.config.tie_embeddings)}
        self._scratch = self._make_scratch(max_rows)
        self._done = 0

    def read(self) -> DeviceWeights:
        """All of it.

        Raises:
            ModelError: a tensor is missing or damaged.
            UnsupportedModelError: 4-bit matrices are of a form that the kernel can not run.
        """
        config = self._source.config
        embed = self._dense(LinearPlan("embed", (("embed", config.vocab_size),), config.hidden_size))
        layers = [self._layer(f"layers.{i}.") for i in range(config.n_layers)]
        head = embed if config.tie_embeddings else self._dense(self._plans["lm_head"])
        final_norm = self._vector("final_norm")
        return DeviceWeights(embed, layers, final_norm, DenseLinear(head, None, self._scratch))

    def _layer(self, p: str) -> DeviceLayer:
        return DeviceLayer(
            attn_norm=self._vector(p + "attn_norm"),
            qkv=self._linear(p + "qkv"),
            q_norm=self._optional(p + "q_norm", self._source.config.qk_norm),
            k_norm=self._optional(p + "k_norm", self._source.config.qk_norm),
            o=self._linear(p + "o"),
            attn_post_norm=self._optional(p + "attn_post_norm", self._source.config.post_norms),
            mlp_norm=self._vector(p + "mlp_norm"),
            gate_up=self._linear(p + "gate_up"),
            down=self._linear(p + "down"),
            mlp_post_norm=self._optional(p + "mlp_post_norm", self._source.config.post_norms),
        )

    def _linear(self, name: str) -> DeviceLinear:
        plan = self._plans[name]
        bias = (
            fused_bias(self._source, plan).to(self._device, self._types.rows) if has_bias(plan, self._source) else None
        )
        packed = self._int4(plan) if self._types.int4 else None
        if packed is not None:
            return Int4Linear(packed, bias, self._scratch)
        dense = self._dense(plan)
        if self._types.fp8:
            return Fp8Linear(*quantize_weight(dense), bias, self._scratch)
        return DenseLinear(dense, bias, self._scratch)

    def _int4(self, plan: LinearPlan) -> Int4Weight | None:
        """The layer in 4 bits where the checkpoint holds all of it so; None where it does not, or in parts that can not
        be run as one."""
        source = self._source
        if not isinstance(source, QuantizedSource) or source.quantized.bits != 4:
            return None
        if not all(source.is_quantized(role) for role, _ in plan.parts):
            return None
        parts = [read_int4(source, role) for role, _ in plan.parts]
        try:
            return stack_int4(parts).to(self._device)
        except ValueError as error:
            logger.warning("%s: %s is held in 16 bits: %s", source.name, plan.name, error)
            return None

    def _dense(self, plan: LinearPlan) -> Tensor:
        """The fused matrix in the rows' type, converted a slice at a time on a few threads."""
        out = torch.empty(plan.rows, plan.columns, dtype=self._types.rows, device=self._device)
        step = max(SLICE_VALUES // plan.columns, 1)

        def convert(low: int) -> None:
            high = min(low + step, plan.rows)
            out[low:high] = fused_rows(self._source, plan, low, high).to(out.dtype)

        with conversion_pool() as pool:
            list(pool.map(convert, range(0, plan.rows, step)))
        self._done += out.numel()
        total = sum(each.rows * each.columns for each in self._plans.values())
        self._progress(f"loading {self._source.name}", min(self._done, total), total)
        return out

    def _vector(self, role: str) -> Tensor:
        return self._source.vector(role).to(self._device, self._types.rows)

    def _optional(self, role: str, there: bool) -> Tensor | None:
        return self._vector(role) if there else None

    def _make_scratch(self, max_rows: int) -> LayerScratch:
        config, rows = self._source.config, self._types.rows
        int4 = self._types.int4 and isinstance(self._source, QuantizedSource)
        forms: list[tuple[LinearKind, int]] = [(KINDS[rows], GROUP_SIZES[-1])]
        forms += [("fp8", GROUP_SIZES[-1])] if self._types.fp8 else []
        forms += [("int4", group) for group in GROUP_SIZES] if int4 else []
        shapes = {(plan.rows, plan.columns) for plan in self._plans.values()}
        layers = [(n, k, kind, group) for n, k in shapes for kind, group in forms]
        widest = max(config.hidden_size, config.q_size, config.intermediate_size)
        return LayerScratch(
            torch.zeros(max_rows * widest, dtype=rows, device=self._device),
            torch.zeros(max_rows, dtype=torch.float32, device=self._device),
            LinearWorkspace.for_layers(layers, max_rows, self._device, permuted=rows if int4 else None),
        )
