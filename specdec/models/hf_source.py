"""Reads a Hugging Face model folder: config.json and safetensors, single or sharded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.hf_config import parse_hf_config
from specdec.models.model_config import ModelConfig

_TOP = {"embed": "{p}embed_tokens", "final_norm": "{p}norm"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
# Gemma has four norms around a layer, and gives one of the usual names to another of them
_GEMMA_LAYER = _LAYER | {
    "mlp_norm": "pre_feedforward_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_FLOATS = {"F32", "F16", "BF16"}


class HFSource:
    """A `TensorSource` over a model folder. Tensors are memory-mapped and converted slice by slice.

    Raises:
        ModelError: config.json or the weights are missing, truncated or corrupt.
        UnsupportedModelError: the family or a tensor type is not one specdec runs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = folder.name or str(folder)
        raw = read_json(folder / "config.json")
        config = parse_hf_config(raw, str(folder))
        self._files = _open_shards(folder)
        self._where = {tensor: file for file in self._files for tensor in self._files[file].keys()}  # noqa: SIM118
        self._prefix = self._find_prefix()
        head = next((n for n in self._where if n.endswith(("lm_head.weight", "lm_head.qweight"))), None)
        self._head = None if head is None else head.rpartition(".")[0]
        if self._head is None and raw.get("tie_word_embeddings") is not False:
            config = replace(config, tie_embeddings=True)
        self._layer_names = _GEMMA_LAYER if config.family == "gemma3" else _LAYER
        eos = _generation_eos(folder)
        self._config = replace(
            config,
            vocab_size=self._slice(self._prefix + "embed_tokens.weight").get_shape()[0],
            qkv_bias=self._prefix + "layers.0.self_attn.q_proj.bias" in self._where,
            eos_ids=tuple(dict.fromkeys((*config.eos_ids, *eos))),
        )

    @property
    def name(self) -> str:
        """The folder's name."""
        return self._name

    @property
    def config(self) -> ModelConfig:
        """The model's shape as config.json and the tensors tell it."""
        return self._config

    def has(self, role: str) -> bool:
        """Whether the checkpoint holds ``role``."""
        return self._tensor_name(role) in self._where

    def shape(self, role: str) -> tuple[int, ...]:
        """Shape of ``role``."""
        return tuple(self._slice(self._tensor_name(role)).get_shape())

    def rows(self, role: str, low: int, high: int) -> Tensor:
        """Rows [low, high) of matrix ``role``, float32."""
        name = self._tensor_name(role)
        with self._reading(name):
            return self._slice(name)[low:high].float().contiguous()

    def vector(self, role: str) -> Tensor:
        """Vector ``role``, float32; Gemma's norms, stored as w - 1, get their one back."""
        name = self._tensor_name(role)
        with self._reading(name):
            values = self._slice(name)[:].float()
        return values + 1.0 if self._config.family == "gemma3" and role.endswith("_norm") else values

    def module(self, role: str) -> str:
        """What the file calls the module that holds matrix ``role``; its tensors are ``module.weight`` and the like."""
        return self._tensor_name(role).removesuffix(".weight")

    def holds(self, tensor: str) -> bool:
        """Whether the file holds a tensor of this name."""
        return tensor in self._where

    def raw_shape(self, tensor: str) -> tuple[int, ...]:
        """Shape of the tensor that the file calls ``tensor``; ModelError when it is missing."""
        return tuple(self._view(tensor).get_shape())

    def raw(self, tensor: str, columns: slice | None = None) -> Tensor:
        """The tensor that the file calls ``tensor``, of whatever type, or ``columns`` of that matrix."""
        with self._reading(tensor):
            view = self._view(tensor)
            values: Tensor = view[:] if columns is None else view[:, columns]
            return values

    def _tensor_name(self, role: str) -> str:
        role, kind = (role.removesuffix(".bias"), ".bias") if role.endswith(".bias") else (role, ".weight")
        if role == "lm_head":
            return (self._head or "lm_head") + kind
        if role in _TOP:
            return _TOP[role].format(p=self._prefix) + kind
        _, layer, part = role.split(".")
        return f"{self._prefix}layers.{layer}.{self._layer_names.get(part, part)}{kind}"

    def _view(self, tensor: str) -> Any:
        if tensor not in self._where:
            raise ModelError(f"{self._folder}: tensor {tensor} is missing; the download is incomplete, fetch it again")
        return self._files[self._where[tensor]].get_slice(tensor)

    def _slice(self, tensor: str) -> Any:
        view = self._view(tensor)
        if view.get_dtype() not in _FLOATS:
            raise UnsupportedModelError(
                f"{self._folder}: tensor {tensor} has type {view.get_dtype()}; use bf16, fp16 or fp32 weights, or GGUF"
            )
        return view

    def _find_prefix(self) -> str:
        suffix = "embed_tokens.weight"
        found = [name for name in self._where if name.endswith(suffix)]
        if not found:
            raise ModelError(f"{self._folder}: no token embedding among the weights; the model folder is incomplete")
        return found[0].removesuffix(suffix)

    @contextmanager
    def _reading(self, tensor: str) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, RuntimeError) as error:
            raise ModelError(f"{self._folder}: tensor {tensor} can not be read ({error}); fetch it again") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from ``path``; ModelError when it is missing or not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent}: no {path.name}; name a Hugging Face model folder or a .gguf file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: can not be read ({error}); fetch the model again") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold a JSON object; fetch the model again")
    return data


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: those the index names, or else all there are; ModelError when none."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        if any(Path(name).name != name for name in names):
            raise ModelError(f"{index}: names a file outside the folder")
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise ModelError(f"{folder}: {missing[0]} is missing, the index names it; fetch the model again")
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{folder}: no .safetensors weights; convert the model with save_pretrained or use a GGUF file"
        )
    return files


def _open_shards(folder: Path) -> dict[Path, Any]:
    shards = {}
    for path in weight_files(folder):
        try:
            shards[path] = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: truncated or corrupt ({error}); fetch the model again") from None
    return shards


def _generation_eos(folder: Path) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    given = read_json(path).get("eos_token_id") if path.exists() else None
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list) else (given,)
