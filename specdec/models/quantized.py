"""Reads GPTQ, AWQ and compressed-tensors folders: as floats, as blocks for the CPU's kernels, or as levels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.errors import ModelError
from specdec.models.checkpoint import StoredBlocks, TensorSource
from specdec.models.hf import HFSource, QuantizedConfig, QuantMethod
from specdec.models.weights import linear_plans
from verify_kernels.packed_weights import BlockKind
from verify_kernels.quant_formats import FORMATS, GROUP

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word, from the lowest, is the AWQ_ORDER[i]-th of its eight columns


def unpack_columns(words: Tensor, bits: int) -> Tensor:
    """uint8 [rows, columns * 32 / bits] of ``words`` int32 [rows, columns]: neighbours, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[:, :, None] >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(1)


def unpack_awq_columns(words: Tensor) -> Tensor:
    """uint8 [rows, columns * 8] of ``words`` int32 [rows, columns], in AWQ's order."""
    nibbles = unpack_columns(words, 4).unflatten(1, (-1, 8))
    place = torch.tensor(AWQ_ORDER).argsort()
    return nibbles[:, :, place].flatten(1)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """w[i, j] = (levels[i, j] - zeros[i, g]) * scales[i, g] with g = groups[j]."""

    levels: Tensor  # uint8 [out, in]
    zeros: Tensor  # int16 [out, groups]
    scales: Tensor  # floating-point [out, groups], as stored
    groups: Tensor  # int64 [in], the group of each input channel

    def dequantised(self) -> Tensor:
        """The matrix, float32 [out, in]."""
        centred = self.levels.float() - self.zeros.float()[:, self.groups]
        return centred * self.scales.float()[:, self.groups]


def group_order(groups: Tensor, size: int) -> Tensor | None:
    """The input channels in the order of their ``groups`` [in], int64 [in]; None if they are in order.

    Raises:
        ValueError: the groups do not have ``size`` channels each.
    """
    straight = torch.arange(len(groups)) // size
    if torch.equal(groups, straight):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], straight):
        raise ValueError("g_idx has groups of unequal sizes")
    return order


@dataclass(frozen=True, slots=True)
class _Parts:
    """Name endings of the tensors of a quantised matrix."""

    levels: str
    zeros: str
    scales: str
    groups: str


_WORDS = _Parts("qweight", "qzeros", "scales", "g_idx")
_PARTS: dict[QuantMethod, _Parts] = {
    "awq": _WORDS,
    "gptq": _WORDS,
    "compressed-tensors": _Parts("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx"),
}


class QuantizedSource(TensorSource):
    """A source over a folder whose quantised matrices are words of several levels, zero points and scales.

    Some also have the group of each input channel (act-order). Other matrices are as in any folder. ModelError if no
    matrix is quantised.

    AWQ ("gemm"): qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales [groups, out].
    GPTQ: qweight int32 [in * bits / 32, out], qzeros int32 [groups, out * bits / 32], scales [groups, out], g_idx int32
    [in].
    compressed-tensors ("pack-quantized"): weight_packed int32 [out, in * bits / 32], weight_scale [out, groups], and
    where they are not symmetric weight_zero_point int32 [out * bits / 32, groups]; weight_g_idx int32 [in].
    """

    def __init__(self, inner: HFSource, quantized: QuantizedConfig) -> None:
        self._inner = inner
        self.name, self.config, self.quantized = inner.name, inner.config, quantized
        self._parts = _PARTS[quantized.method]
        self._by_rows = quantized.method == "compressed-tensors"  # the others hold columns beside each other
        self._stored: dict[str, StoredBlocks | None] = {}  # found so far, by role
        plans = linear_plans(self.config)
        if not any(self.is_quantized(role) for plan in plans for role, _ in plan.parts):
            raise ModelError(
                f"{self.name}: config.json has a quantization_config ({quantized.method}, group_size "
                f"{quantized.group_size}), but none of the weights is quantised; remove it, or fetch the model again"
            )

    def is_quantized(self, role: str) -> bool:
        """Whether matrix ``role`` is stored quantised."""
        return self._inner.holds(self._tensor(role, self._parts.levels))

    def has(self, role: str) -> bool:
        return self._inner.has(role) or self.is_quantized(role)

    def shape(self, role: str) -> tuple[int, ...]:
        """Shape of ``role``; ModelError when its parts do not fit each other."""
        if not self.is_quantized(role):
            return self._inner.shape(role)
        per_word, parts = self.quantized.per_word, self._parts
        rows, columns = self._sizes(role, parts.levels)
        if self._by_rows:
            outputs, inputs = rows, columns * per_word
        elif self.quantized.method == "awq":
            outputs, inputs = columns * per_word, rows
        else:
            outputs, inputs = columns, rows * per_word
        groups = -(-inputs // self.group_size(inputs))
        if not self.quantized.symmetric:
            self._expect(role, parts.zeros, (groups, -(-outputs // per_word)))
        self._expect(role, parts.scales, (groups, outputs))
        if self._has_groups(role):
            self._expect(role, parts.groups, (inputs,))
        return outputs, inputs

    def rows(self, role: str, low: int, high: int) -> Tensor:
        if not self.is_quantized(role):
            return self._inner.rows(role, low, high)
        return self.matrix(role, low, high).dequantised()

    def vector(self, role: str) -> Tensor:
        return self._inner.vector(role)

    def matrix(self, role: str, low: int, high: int) -> QuantizedMatrix:
        """Rows [low, high) of quantised matrix ``role`` as they are stored, unpacked."""
        groups = self.groups(role)
        scales = self._read(role, self._parts.scales, low, high)
        return QuantizedMatrix(self._levels(role, low, high), self._zeros(role, low, high), scales, groups)

    def groups(self, role: str) -> Tensor:
        """int64 [in], the group of each input channel of quantised matrix ``role``; ModelError where one is none."""
        inputs = self.shape(role)[1]
        size = self.group_size(inputs)
        straight = torch.arange(inputs) // size
        if not self._has_groups(role):
            return straight
        given, groups = self._inner.raw(self._tensor(role, self._parts.groups)).long(), -(-inputs // size)
        if self._by_rows and bool((given == -1).all()):  # its initial value, which compressed-tensors takes for none
            return straight
        if bool((given < 0).any()) or bool((given >= groups).any()):
            raise ModelError(
                f"{self.name}: tensor {self._tensor(role, self._parts.groups)} names groups beyond the {groups} there "
                "are; the file is damaged, fetch it again"
            )
        return given

    def stored_blocks(self, role: str) -> StoredBlocks | None:
        """The block format that holds matrix ``role`` without loss.

        None where none does: not 4 bits, groups that are no multiple of 32 inputs, or scales beyond float16.
        """
        if role not in self._stored:
            self._stored[role] = self._find_blocks(role)
        return self._stored[role]

    def blocks(self, role: str, low: int, high: int) -> Tensor:
        form = self.stored_blocks(role)
        assert form is not None, role
        matrix, layout = self.matrix(role, low, high), FORMATS[form.kind]
        levels = matrix.levels if form.order is None else matrix.levels[:, form.order]
        outputs, inputs = levels.shape
        count = -(-inputs // layout.block)
        group = torch.arange(count) * layout.block // self.group_size(inputs)
        raw = torch.empty(outputs, count, layout.block_bytes, dtype=torch.uint8)
        raw[..., :2] = matrix.scales[:, group, None].half().view(torch.uint8)
        raw[..., 2] = matrix.zeros[:, group]
        padded = torch.nn.functional.pad(levels, (0, count * layout.block - inputs)).unflatten(1, (count, -1))
        raw[..., 3:] = padded[..., ::2] | padded[..., 1::2] << 4
        return raw.flatten(1)

    def _find_blocks(self, role: str) -> StoredBlocks | None:
        if not self.is_quantized(role) or self.quantized.bits != 4:
            return None
        outputs, inputs = self.shape(role)
        size = self.group_size(inputs)
        kinds: tuple[BlockKind, ...] = ("u4_128", "u4_64", "u4_32")
        # of a single group the last block may be short
        kind = next((each for each in kinds if size >= inputs or size % FORMATS[each].block == 0), None)
        if kind is None or inputs % GROUP:
            return None
        scales = self._read(role, self._parts.scales, 0, outputs)
        if not torch.equal(scales.half().to(scales.dtype), scales):
            return None
        try:
            return StoredBlocks(kind, group_order(self.groups(role), size))
        except ValueError:
            return None

    def group_size(self, inputs: int) -> int:
        """Input channels that share a scale in a matrix of ``inputs``."""
        return inputs if self.quantized.group_size == -1 else self.quantized.group_size

    def _levels(self, role: str, low: int, high: int) -> Tensor:
        """uint8 [high - low, in]."""
        tensor, bits = self._tensor(role, self._parts.levels), self.quantized.bits
        if self._by_rows:
            return unpack_columns(self._inner.raw(tensor, slice(low, high)), bits)
        if self.quantized.method == "gptq":
            return unpack_columns(self._inner.raw(tensor, columns=slice(low, high)).t(), bits)
        words, cut = self._words(low, high)
        return unpack_awq_columns(self._inner.raw(tensor, columns=words))[:, cut].t().contiguous()

    def _zeros(self, role: str, low: int, high: int) -> Tensor:
        """int16 [high - low, groups]."""
        config = self.quantized
        if config.symmetric:
            groups = self._inner.raw_shape(self._tensor(role, self._parts.scales))[1]
            return torch.full((high - low, groups), 2 ** (config.bits - 1), dtype=torch.int16)
        words, cut = self._words(low, high)
        stored = self._read(role, self._parts.zeros, words.start, words.stop)
        if config.method == "awq":
            return unpack_awq_columns(stored.t())[:, cut].t().to(torch.int16)
        return unpack_columns(stored.t(), config.bits).t()[cut].to(torch.int16) + config.zero_offset

    def _words(self, low: int, high: int) -> tuple[slice, slice]:
        """The words that hold values [low, high), and where in them these lie."""
        per_word = self.quantized.per_word
        first, last = low // per_word, -(-high // per_word)
        return slice(first, last), slice(low - first * per_word, high - first * per_word)

    def _has_groups(self, role: str) -> bool:
        return self.quantized.act_order or self._inner.holds(self._tensor(role, self._parts.groups))

    def _tensor(self, role: str, part: str) -> str:
        return f"{self._inner.module(role)}.{part}"

    def _read(self, role: str, part: str, low: int, high: int) -> Tensor:
        """[high - low, groups] of a part that has a row per output, or, in most files, a column."""
        tensor = self._tensor(role, part)
        if self._by_rows:
            return self._inner.raw(tensor, slice(low, high))
        return self._inner.raw(tensor, columns=slice(low, high)).t().contiguous()

    def _sizes(self, role: str, part: str) -> tuple[int, ...]:
        sizes = self._inner.raw_shape(self._tensor(role, part))
        if len(sizes) != 2:
            raise ModelError(
                f"{self.name}: tensor {self._tensor(role, part)} has shape {list(sizes)}; must be a matrix"
            )
        return sizes

    def _expect(self, role: str, part: str, shape: tuple[int, ...]) -> None:
        found = self._inner.raw_shape(self._tensor(role, part))
        shape = shape[::-1] if self._by_rows else shape
        if found != shape:
            raise ModelError(
                f"{self.name}: tensor {self._tensor(role, part)} has shape {list(found)}; its {self._parts.levels} and "
                f"group_size {self.quantized.group_size} call for {list(shape)}, so the file or config.json is damaged"
            )
