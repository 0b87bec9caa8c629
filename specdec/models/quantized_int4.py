"""Matrices of AWQ and GPTQ folders for the 4-bit GPU kernel, without a detour over floating-point values."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import UnsupportedModelError
from specdec.models.quantized_matrix import QuantizedMatrix
from specdec.models.quantized_source import QuantizedSource
from verify_kernels.gpu.linear_int4_weight import GROUP_SIZES, SCALE_TYPES, Int4Weight, pack_int4

WAY_OUT = "run the model on the CPU, or use one of 4 bits in groups of 32, 64 or 128"


def read_int4(source: QuantizedSource, role: str) -> Int4Weight:
    """Quantised matrix ``role`` packed for `verify_kernels.gpu.linear_int4`. Layers that are fused in a model are read
    one by one and put together with `stack_int4`.

    Groups larger than the kernel's repeat their scales; input channels in an order of their own (act-order) are sorted
    by group once, here, and the weight says how.

    Raises:
        ModelError: a tensor is missing, damaged or of a shape that does not fit the others.
        UnsupportedModelError: the kernel can not run it: not 4 bits, groups too small or of unequal sizes.
    """
    where = f"{source.name}: {role}"
    if source.quantized.bits != 4:
        raise UnsupportedModelError(f"{where}: bits is {source.quantized.bits}; the GPU kernel reads 4, {WAY_OUT}")
    outputs, inputs = source.shape(role)
    matrix = source.matrix(role, 0, outputs)
    size = inputs if source.quantized.group_size == -1 else source.quantized.group_size
    perm = _order(matrix.groups, size, where)
    levels = matrix.levels if perm is None else matrix.levels[:, perm]
    group = next((g for g in reversed(GROUP_SIZES) if size % g == 0), None)
    if group is None and size == inputs:
        group = GROUP_SIZES[-1]  # one group: its last part may be short
    if group is None:
        raise UnsupportedModelError(f"{where}: group_size is {size}; the GPU kernel can not split it, {WAY_OUT}")
    return pack_int4(levels, *_scales(matrix, size, group, inputs), group, perm)


def _order(groups: Tensor, size: int, where: str) -> Tensor | None:
    """The input channels in the order of their groups; None if they stand so."""
    straight = torch.arange(len(groups)) // size
    if torch.equal(groups, straight):
        return None
    perm = groups.argsort(stable=True)
    if not torch.equal(groups[perm], straight):
        raise UnsupportedModelError(f"{where}: g_idx has groups of unequal sizes; {WAY_OUT}")
    return perm


def _scales(matrix: QuantizedMatrix, size: int, group: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Scales and zero points of groups of ``group`` input channels."""
    scales = matrix.scales if matrix.scales.dtype in SCALE_TYPES else matrix.scales.half()
    of_group = torch.arange(0, inputs, group) // size
    return scales[:, of_group], matrix.zeros.to(torch.uint8)[:, of_group]
