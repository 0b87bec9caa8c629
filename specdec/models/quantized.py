"""AWQ and GPTQ model folders as a tensor source: dequantised slice by slice, or as levels, zero points and scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.errors import ModelError
from specdec.models.config import ModelConfig
from specdec.models.hf import HFSource, QuantizedConfig

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word, from the lowest, is the AWQ_ORDER[i]-th of its eight columns


def unpack_columns(words: Tensor, bits: int) -> Tensor:
    """uint8 [rows, columns * 32 / bits] of ``words`` int32 [rows, columns]: neighbours, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[:, :, None] >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(1)


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """uint8 [rows * 32 / bits, columns] of ``words`` int32 [rows, columns]: neighbours, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)[:, None]
    return ((words[:, None, :] >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(0, 1)


def unpack_awq_columns(words: Tensor) -> Tensor:
    """uint8 [rows, columns * 8] of ``words`` int32 [rows, columns], in AWQ's order."""
    nibbles = unpack_columns(words, 4).unflatten(1, (-1, 8))
    place = torch.tensor(AWQ_ORDER).argsort()
    return nibbles[:, :, place].flatten(1)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """w[i, j] = (levels[i, j] - zeros[i, g]) * scales[i, g] with g = groups[j].

    levels: uint8 [out, in]. zeros: int16 [out, groups]. scales: floating-point [out, groups], as stored. groups: int64
    [in], the group of each input channel.
    """

    levels: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor

    def dequantised(self) -> Tensor:
        """The matrix, float32 [out, in]."""
        centred = self.levels.float() - self.zeros.float()[:, self.groups]
        return centred * self.scales.float()[:, self.groups]


class QuantizedSource:
    """A `TensorSource` over a folder some of whose matrices are stored as qweight, qzeros, scales and, for GPTQ,
    g_idx; the others are as in any folder.

    AWQ ("gemm"): qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales [groups, out].
    GPTQ: qweight int32 [in * bits / 32, out], qzeros int32 [groups, out * bits / 32], scales [groups, out], g_idx int32
    [in].
    """

    def __init__(self, inner: HFSource, quantized: QuantizedConfig) -> None:
        self._inner = inner
        self._quantized = quantized

    @property
    def name(self) -> str:
        """The folder's name."""
        return self._inner.name

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self._inner.config

    @property
    def quantized(self) -> QuantizedConfig:
        """How the matrices are stored."""
        return self._quantized

    def is_quantized(self, role: str) -> bool:
        """Whether matrix ``role`` is stored quantised."""
        return self._inner.holds(self._part(role, "qweight"))

    def has(self, role: str) -> bool:
        """Whether the checkpoint holds ``role``."""
        return self._inner.has(role) or self.is_quantized(role)

    def shape(self, role: str) -> tuple[int, ...]:
        """Shape of ``role``; ModelError when its parts do not fit each other."""
        if not self.is_quantized(role):
            return self._inner.shape(role)
        per_word, group = self._quantized.per_word, self._quantized.group_size
        awq = self._quantized.method == "awq"
        rows, columns = self._sizes(role, "qweight")
        inputs, outputs = (rows, columns * per_word) if awq else (rows * per_word, columns)
        groups = 1 if group == -1 else -(-inputs // group)
        self._expect(role, "qzeros", (groups, -(-outputs // per_word)))
        self._expect(role, "scales", (groups, outputs))
        if self._inner.holds(self._part(role, "g_idx")):
            self._expect(role, "g_idx", (inputs,))
        return outputs, inputs

    def rows(self, role: str, low: int, high: int) -> Tensor:
        """Rows [low, high) of matrix ``role``, float32."""
        if not self.is_quantized(role):
            return self._inner.rows(role, low, high)
        return self.matrix(role, low, high).dequantised()

    def vector(self, role: str) -> Tensor:
        """Vector ``role``, float32."""
        return self._inner.vector(role)

    def matrix(self, role: str, low: int, high: int) -> QuantizedMatrix:
        """Rows [low, high) of quantised matrix ``role`` as they are stored, unpacked."""
        inputs, per_word = self.shape(role)[1], self._quantized.per_word
        first, last = low // per_word, -(-high // per_word)
        cut = slice(low - first * per_word, high - first * per_word)
        words = slice(first, last)
        zeros = self._read(role, "qzeros", words)
        if self._quantized.method == "awq":
            levels = unpack_awq_columns(self._read(role, "qweight", words))[:, cut]
            centre = unpack_awq_columns(zeros)[:, cut]
        else:
            levels = unpack_rows(self._read(role, "qweight", slice(low, high)), self._quantized.bits)
            centre = unpack_columns(zeros, self._quantized.bits)[:, cut]
        scales = self._read(role, "scales", slice(low, high))
        return QuantizedMatrix(
            levels.t().contiguous(),
            centre.t().to(torch.int16) + self._quantized.zero_offset,
            scales.t().contiguous(),
            self._groups(role, inputs, len(scales)),
        )

    def _groups(self, role: str, inputs: int, groups: int) -> Tensor:
        size = inputs if self._quantized.group_size == -1 else self._quantized.group_size
        if not self._inner.holds(self._part(role, "g_idx")):
            return torch.arange(inputs) // size
        given = self._inner.raw(self._part(role, "g_idx")).long()
        if bool((given < 0).any()) or bool((given >= groups).any()):
            raise ModelError(
                f"{self.name}: tensor {self._part(role, 'g_idx')} names groups beyond the {groups} there are; "
                "the file is damaged, fetch it again"
            )
        return given

    def _part(self, role: str, part: str) -> str:
        return f"{self._inner.module(role)}.{part}"

    def _read(self, role: str, part: str, columns: slice) -> Tensor:
        return self._inner.raw(self._part(role, part), columns)

    def _sizes(self, role: str, part: str) -> tuple[int, ...]:
        sizes = self._inner.raw_shape(self._part(role, part))
        if len(sizes) != 2:
            raise ModelError(f"{self.name}: tensor {self._part(role, part)} has shape {list(sizes)}; must be a matrix")
        return sizes

    def _expect(self, role: str, part: str, shape: tuple[int, ...]) -> None:
        found = self._inner.raw_shape(self._part(role, part))
        if found != shape:
            raise ModelError(
                f"{self.name}: tensor {self._part(role, part)} has shape {list(found)}; its qweight and group_size "
                f"{self._quantized.group_size} call for {list(shape)}, so the file or config.json is damaged"
            )
