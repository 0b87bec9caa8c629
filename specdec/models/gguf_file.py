"""Reads a GGUF file: its metadata into plain values, its tensors as memory-mapped bytes.

The `gguf` library's own reader keeps a numpy view per array element, which takes seconds for a vocabulary of
150,000 tokens, and does not notice a truncated file until a tensor is touched. Format: the GGUF specification in
the ggml repository, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.gguf_tensor import GGUFTensor

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_TYPES = GGMLQuantizationType
SUPPORTED_TYPES = frozenset(
    {
        _TYPES.F32,
        _TYPES.F16,
        _TYPES.BF16,
        _TYPES.Q8_0,
        _TYPES.Q4_0,
        _TYPES.Q4_1,
        _TYPES.Q5_0,
        _TYPES.Q5_1,
        _TYPES.Q4_K,
        _TYPES.Q5_K,
        _TYPES.Q6_K,
    }
)


class GGUFFile:
    """An open GGUF file. ``metadata`` maps keys to ints, floats, bools, strings or lists of them; ``tensors`` maps
    names to where their bytes lie.

    Raises:
        ModelError: the file can not be read, is no GGUF file, is truncated or corrupt.
        UnsupportedModelError: its version or byte order is not one specdec reads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes = np.memmap(path, mode="r", dtype=np.uint8)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: can not be read ({error})") from None
        self._data = self._bytes.data
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, IndexError, OverflowError) as error:
            raise ModelError(f"{path}: truncated or corrupt GGUF header ({error}); fetch the file again") from None
        self._check_extents()

    def rows(self, name: str, index: np.ndarray | slice) -> np.ndarray:
        """Rows of matrix ``name`` chosen by ``index``, dequantised to float32 [rows, row length]."""
        tensor = self.tensors[name]
        if tensor.type not in SUPPORTED_TYPES:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name} has type {tensor.type.name}; use a GGUF of one of "
                + ", ".join(sorted(kind.name for kind in SUPPORTED_TYPES))
            )
        raw = self._bytes[tensor.offset : tensor.offset + tensor.nbytes].reshape(-1, tensor.row_bytes)
        chosen = np.array(raw[index])  # a copy: the mapping is read-only, and tensors must not be
        if tensor.type == _TYPES.F32:
            return chosen.view(np.float32)
        if tensor.type == _TYPES.F16:
            return chosen.view(np.float16).astype(np.float32)
        return np.ascontiguousarray(dequantize(chosen, tensor.type), dtype=np.float32)

    def _read(self) -> None:
        if bytes(self._data[:4]) != _MAGIC:
            raise ModelError(f"{self.path}: not a GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise UnsupportedModelError(
                f"{self.path}: GGUF version {version} is not supported; convert it to version 3"
            )
        n_tensors, n_keys = self._scalar("Q"), self._scalar("Q")
        for _ in range(n_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        places = [self._tensor_place() for _ in range(n_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ModelError(f"{self.path}: alignment {alignment!r} makes no sense; the file is corrupt")
        start = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in places:
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise ModelError(
                    f"{self.path}: tensor {name} has rows of {shape[-1]} in {kind.name}; the file is corrupt"
                )
            row_bytes = shape[-1] // block * block_bytes
            self.tensors[name] = GGUFTensor(name, shape, kind, start + offset, row_bytes)

    def _tensor_place(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        n_dims = self._scalar("I")
        if not 0 < n_dims <= 4:
            raise ModelError(f"{self.path}: tensor {name} has {n_dims} dimensions; the file is corrupt")
        shape = tuple(self._scalar("Q") for _ in range(n_dims))[::-1]  # the file counts from the innermost
        code = self._scalar("I")
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise UnsupportedModelError(f"{self.path}: tensor {name} has the unknown type {code}") from None
        return name, shape, kind, self._scalar("Q")

    def _check_extents(self) -> None:
        size = len(self._data)
        for tensor in self.tensors.values():
            if tensor.offset + tensor.nbytes > size:
                raise ModelError(
                    f"{self.path}: truncated: tensor {tensor.name} ends at byte {tensor.offset + tensor.nbytes}, "
                    f"the file has {size}; fetch it again"
                )

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        return self._text().decode("utf-8")

    def _text(self) -> bytes:
        length = self._scalar("Q")
        end = self._at + length
        if end > len(self._data):
            raise IndexError(f"a string of {length} bytes at byte {self._at}")
        text = bytes(self._data[self._at : end])
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ModelError(f"{self.path}: metadata of the unknown type {kind}; the file is corrupt")
        item, count = self._scalar("I"), self._scalar("Q")
        if item == _STRING:
            return [self._text().decode("utf-8", "replace") for _ in range(count)]
        if item not in _SCALARS:
            raise ModelError(f"{self.path}: metadata array of the unknown type {item}; the file is corrupt")
        code = f"<{count}{_SCALARS[item]}"
        values = struct.unpack_from(code, self._data, self._at)
        self._at += struct.calcsize(code)
        return list(values)
