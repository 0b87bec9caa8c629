"""Weights in blocks, repacked and rounded by C++ (`csrc/packing.cpp`): a model's first start waits for it."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from verify_kernels.packed_weights import FITS, BlockKind
from verify_kernels.quant_formats import FORMATS, GROUP, packed_shape

_KINDS = {name: i for i, name in enumerate(FORMATS, start=3)}  # csrc/linear.h
_SIGNATURES = {
    "sd_pack_blocks": (c_int, c_void_p, c_int64, c_int64, c_void_p),
    "sd_block_floats": (c_int, c_void_p, c_int64, c_void_p),
    "sd_round_blocks": (c_void_p, c_int64, c_void_p, c_int, c_void_p),
}


class NativePacking:
    """`BlockPacking` by ``library``, which is what `load_library` returned. Safe to use from several threads, which
    run at once."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._fits = torch.tensor(FITS)
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None

    def pack(self, raw: Tensor, kind: BlockKind) -> Tensor:
        """As `quant_formats.pack_blocks`."""
        raw, layout = raw.contiguous(), FORMATS[kind]
        rows, blocks = raw.shape[0], raw.shape[1] // layout.block_bytes
        out = torch.empty(packed_shape(kind, rows, blocks * layout.block), dtype=torch.uint8)
        self._library.sd_pack_blocks(_KINDS[kind], raw.data_ptr(), rows, blocks, out.data_ptr())
        return out

    def floats(self, raw: Tensor, kind: BlockKind) -> Tensor:
        """What blocks of a GGUF file stand for."""
        raw, layout = raw.contiguous(), FORMATS[kind]
        blocks = raw.shape[1] // layout.block_bytes
        out = torch.empty(raw.shape[0], blocks * layout.block)
        self._library.sd_block_floats(_KINDS[kind], raw.data_ptr(), raw.shape[0] * blocks, out.data_ptr())
        return out

    def round(self, weight: Tensor) -> Tensor:
        """As `packed_weights.round_blocks`, of which sums may be added in another order."""
        weight = weight.contiguous()
        groups = weight.numel() // GROUP
        raw = torch.empty(weight.shape[0], weight.shape[1] // GROUP * FORMATS["q4_0"].block_bytes, dtype=torch.uint8)
        self._library.sd_round_blocks(weight.data_ptr(), groups, self._fits.data_ptr(), len(FITS), raw.data_ptr())
        return raw
