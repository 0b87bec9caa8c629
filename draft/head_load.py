"""Loads an EAGLE-3 checkpoint for a target."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from draft.head_config import HeadConfig, parse_head_config
from draft.head_model import HeadModel
from draft.head_tensors import HeadTensors
from specdec.config import Dtype
from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.hf_source import read_json
from specdec.models.memory import check_memory
from specdec.models.model_config import ModelConfig
from verify_kernels.packed_linear import PackedLinear, pack_linear

_ATTENTION, _MLP = "midlayer.self_attn.", "midlayer.mlp."
_NORMS = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
_BIASED = ("fc", *(_ATTENTION + f"{part}_proj" for part in "qkvo"))
_OPTIONAL = {"embed_tokens.weight", "d2t", "t2d", *(name + ".bias" for name in _BIASED)}
_BYTES = {"int8": 1, "bf16": 2, "fp32": 4}


def load_head(folder: Path, *, dtype: Dtype, target: ModelConfig, target_embed: Tensor) -> HeadModel:
    """Read and pack the head in ``folder`` (config.json beside safetensors or pytorch_model.bin).

    target_embed: the target's own embedding, used where the checkpoint has none.

    Raises:
        ModelError: a tensor or field is missing, damaged or made for another target, or memory is short.
        UnsupportedModelError: a sound checkpoint of another architecture.
    """
    config = parse_head_config(read_json(folder / "config.json"), str(folder), target)
    tensors = HeadTensors(folder)
    loader = _Loader(folder, tensors, config, dtype, target)
    loader.check()
    return loader.load(target_embed)


class _Loader:
    def __init__(
        self, folder: Path, tensors: HeadTensors, config: HeadConfig, dtype: Dtype, target: ModelConfig
    ) -> None:
        self._folder, self._tensors, self._config = folder, tensors, config
        self._dtype, self._target = dtype, target

    def check(self) -> None:
        """Every tensor is there, has the shape that config and target call for, and means what we take it to mean."""
        expected = self._expected()
        others = [n for n in self._tensors.names if n not in expected and n not in _OPTIONAL and "rotary_emb" not in n]
        if others:
            raise UnsupportedModelError(
                f"{self._folder}: tensor {min(others)} has no place in EAGLE-3's one layer; "
                "use an EAGLE-3 head of one Llama-style layer"
            )
        if "midlayer.hidden_norm.weight" not in self._tensors.names:
            raise UnsupportedModelError(
                f"{self._folder}: tensor midlayer.hidden_norm.weight is missing, so this is no EAGLE-3 head "
                "(EAGLE and EAGLE-2 heads have none); use an EAGLE-3 one"
            )
        for name, shape in expected.items():
            found = self._tensors.shape(name)
            if name == "fc.weight" and found != shape:
                raise ModelError(
                    f"{self._folder}: tensor fc.weight has shape {list(found)}, {list(shape)} is called for: "
                    f"{len(self._config.taps)} features of the target's hidden size {self._target.hidden_size}; "
                    "use a head trained for this target"
                )
            self._check_shape(name, found, shape)
            bias = name.removesuffix(".weight") + ".bias"
            if self._tensors.has(bias):
                self._check_shape(bias, self._tensors.shape(bias), shape[:1])
        size = sum(math.prod(shape) for shape in expected.values()) * _BYTES[self._dtype]
        check_memory(str(self._folder), size, self._dtype)

    def load(self, target_embed: Tensor) -> HeadModel:
        """All of it packed."""
        norms = [self._tensors.floats(name + ".weight") for name in _NORMS]
        return HeadModel(
            name=self._folder.resolve().name,
            config=self._config,
            target_vocab=self._target.vocab_size,
            embed=self._embed(target_embed),
            fc=self._linear("fc"),
            embed_norm=norms[0],
            hidden_norm=norms[1],
            qkv=self._linear(*(_ATTENTION + part + "_proj" for part in "qkv")),
            o=self._linear(_ATTENTION + "o_proj"),
            mlp_norm=norms[2],
            gate_up=self._linear(_MLP + "gate_proj", _MLP + "up_proj"),
            down=self._linear(_MLP + "down_proj"),
            final_norm=norms[3],
            lm_head=self._linear("lm_head"),
            target_ids=self._target_ids(),
        )

    def _expected(self) -> dict[str, tuple[int, ...]]:
        c = self._config.model
        hidden, ffn = c.hidden_size, c.intermediate_size
        matrices: dict[str, tuple[int, ...]] = {
            "fc": (hidden, len(self._config.taps) * self._target.hidden_size),
            _ATTENTION + "q_proj": (c.q_size, 2 * hidden),
            _ATTENTION + "k_proj": (c.kv_size, 2 * hidden),
            _ATTENTION + "v_proj": (c.kv_size, 2 * hidden),
            _ATTENTION + "o_proj": (hidden, c.q_size),
            _MLP + "gate_proj": (ffn, hidden),
            _MLP + "up_proj": (ffn, hidden),
            _MLP + "down_proj": (hidden, ffn),
        }
        matrices |= dict.fromkeys(_NORMS, (hidden,))
        rows = self._tensors.shape("lm_head.weight")[0] if self._tensors.has("lm_head.weight") else 0
        matrices["lm_head"] = (rows, hidden)
        return {name + ".weight": shape for name, shape in matrices.items()}

    def _check_shape(self, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            raise ModelError(
                f"{self._folder}: tensor {name} has shape {list(found)}, config.json calls for {list(shape)}; "
                "the checkpoint is damaged, fetch it again"
            )

    def _linear(self, *names: str) -> PackedLinear:
        weights = [self._tensors.floats(name + ".weight") for name in names]
        bias = None
        if any(self._tensors.has(name + ".bias") for name in names):
            bias = torch.cat([self._bias(name, weight) for name, weight in zip(names, weights, strict=True)])
        return pack_linear(weights[0] if len(weights) == 1 else torch.cat(weights), bias, self._dtype)

    def _bias(self, name: str, weight: Tensor) -> Tensor:
        given = self._tensors.has(name + ".bias")
        return self._tensors.floats(name + ".bias") if given else torch.zeros(weight.shape[0])

    def _embed(self, target_embed: Tensor) -> Tensor:
        hidden, name = self._config.model.hidden_size, "embed_tokens.weight"
        if not self._tensors.has(name):
            if target_embed.shape[1] != hidden:
                raise ModelError(
                    f"{self._folder}: tensor {name} is missing, and the target's is {target_embed.shape[1]} wide where "
                    f"the head needs {hidden}; use a head that holds its own embedding or one made for this target"
                )
            return target_embed
        rows, width = self._tensors.shape(name)
        if rows < self._target.vocab_size or width != hidden:
            raise ModelError(
                f"{self._folder}: tensor {name} has shape {[rows, width]}, [{self._target.vocab_size}, {hidden}] is "
                "called for; use a head trained for this target"
            )
        return self._tensors.floats(name).to(torch.float32 if self._dtype == "fp32" else torch.float16)

    def _target_ids(self) -> Tensor | None:
        """From ``d2t`` (offsets), else from ``t2d`` (which target ids there are), else the identity."""
        rows, vocab = self._tensors.shape("lm_head.weight")[0], self._target.vocab_size
        own = torch.arange(rows)
        if self._tensors.has("d2t"):
            self._check_shape("d2t", self._tensors.shape("d2t"), (rows,))
            name, ids = "d2t", own + self._tensors.integers("d2t")
        elif self._tensors.has("t2d") and rows != vocab:
            name, ids = "t2d", self._tensors.integers("t2d").nonzero().flatten()
            self._check_shape("t2d: the ids it names", tuple(ids.shape), (rows,))
        else:
            name, ids = "lm_head.weight", own
        if rows == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab:
            raise ModelError(
                f"{self._folder}: tensor {name} leads to token ids outside the target's vocabulary of {vocab}; "
                "use a head trained for this target"
            )
        return None if torch.equal(ids, torch.arange(vocab)) else ids
