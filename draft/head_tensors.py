"""Reads the tensors of an EAGLE-3 checkpoint: safetensors, single or sharded, or pytorch_model.bin."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.hf_source import weight_files

_BIN = "pytorch_model.bin"


class HeadTensors:
    """Named tensors of a checkpoint folder, under EAGLE's own names (``midlayer.*``, no ``model.`` in front).

    Raises:
        ModelError: there are no weights, or they are truncated or corrupt.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: dict[str, Tensor] = {}
        self._files: dict[str, Any] = {}
        if not any(folder.glob("*.safetensors")) and (folder / _BIN).exists():
            self._loaded = _read_bin(folder / _BIN)
            self._stored = _stored_names(self._loaded)
            return
        for path in weight_files(folder):
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: truncated or corrupt ({error}); fetch the head again") from None
            self._files.update(dict.fromkeys(file.keys(), file))
        self._stored = _stored_names(self._files)

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor there is."""
        return tuple(self._stored)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds ``name``."""
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of ``name``; ModelError when it is missing."""
        if name not in self._stored:
            raise ModelError(
                f"{self._folder}: tensor {name} is missing; the download is incomplete or this is no EAGLE-3 head"
            )
        stored = self._stored[name]
        if stored in self._loaded:
            return tuple(self._loaded[stored].shape)
        return tuple(self._files[stored].get_slice(stored).get_shape())

    def floats(self, name: str) -> Tensor:
        """``name`` as float32; ModelError when it is missing or unreadable, UnsupportedModelError when quantised."""
        tensor = self._read(name)
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UnsupportedModelError(
                f"{self._folder}: tensor {name} has type {tensor.dtype}; use a head in bf16, fp16 or fp32"
            )
        return tensor.float().contiguous()

    def integers(self, name: str) -> Tensor:
        """``name`` (integer or bool) as int64; ModelError when it is missing, unreadable or of another type."""
        tensor = self._read(name)
        if tensor.is_floating_point() or tensor.is_complex():
            raise ModelError(
                f"{self._folder}: tensor {name} has type {tensor.dtype}, not an integer one; fetch the head again"
            )
        return tensor.long()

    def _read(self, name: str) -> Tensor:
        self.shape(name)
        stored = self._stored[name]
        if stored in self._loaded:
            return self._loaded[stored]
        try:
            tensor: Tensor = self._files[stored].get_tensor(stored)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise ModelError(f"{self._folder}: tensor {name} can not be read ({error}); fetch it again") from None
        return tensor


def _stored_names(stored: Iterable[str]) -> dict[str, str]:
    """EAGLE's name of each tensor -> the name it is stored under; vLLM and SpecForge write ``layers.0.``."""
    names = {}
    for name in stored:
        plain = name.removeprefix("model.")
        names["midlayer." + plain.removeprefix("layers.0.") if plain.startswith("layers.0.") else plain] = name
    return names


def _read_bin(path: Path) -> dict[str, Tensor]:
    try:
        # weights_only: a pickle from the network must not run code
        data = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{path}: truncated, corrupt or not plain tensors ({reason}); fetch the head again") from None
    if not isinstance(data, dict) or not all(isinstance(value, Tensor) for value in data.values()):
        raise ModelError(f"{path}: must hold a dictionary of tensors; fetch the head again")
    return data
