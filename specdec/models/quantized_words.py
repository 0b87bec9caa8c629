"""Small integers packed in 32-bit words, as AWQ and GPTQ checkpoints store them."""

from __future__ import annotations

import torch
from torch import Tensor

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
