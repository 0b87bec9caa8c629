"""Loads an EAGLE-3 head for a target: configuration, tensors, packed weights."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.config import Dtype
from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.checkpoint import check_regular, fingerprint_files
from specdec.models.config import ModelConfig
from specdec.models.hf import open_shards, parse_hf_config, read_json, readable
from specdec.models.load import check_heads
from specdec.models.memory import check_memory
from verify_kernels.packed_weights import PackedLinear, RoundedKind, pack_linear

_MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral")  # of heads; all have the same layer
_VARIANTS = ("norm_before_fc", "norm_output", "fc_norm", "parallel_drafting")  # flags of heads with other equations
_AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
_WAY_OUT = "use an EAGLE-3 head of one Llama-style layer"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Shape and numerics of a head."""

    model: ModelConfig  # the layer, as a decoder of one layer
    aux_layers: tuple[int, ...]  # the target's layers whose inputs are the head's features, in order
    residual_normed: bool  # the attention's residual is the normed hidden state instead of the plain one


def parse_head_config(raw: dict[str, Any], name: str, target: ModelConfig) -> HeadConfig:
    """The head's shape from its parsed ``config.json``, in its plain form or in that of vLLM's speculators.

    Raises:
        UnsupportedModelError: another kind of head, or more than one layer.
        ModelError: a field is missing, out of range or does not fit the target.
    """
    data = raw | raw.get("transformer_layer_config", {})
    kind = data.get("model_type", "llama")
    if kind not in _MODEL_TYPES and "transformer_layer_config" not in raw:
        raise UnsupportedModelError(f"{name}: config.json: model_type '{kind}' is not supported; {_WAY_OUT}")
    for flag in _VARIANTS:
        if data.get(flag):
            raise UnsupportedModelError(f"{name}: config.json: '{flag}' is not supported; {_WAY_OUT}")
    eagle = data.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state") is False:
        raise UnsupportedModelError(f"{name}: config.json: use_aux_hidden_state is false; {_WAY_OUT}")
    model = parse_hf_config(data | {"model_type": "llama"}, name)
    if model.n_layers != 1:
        raise UnsupportedModelError(
            f"{name}: config.json: num_hidden_layers is {model.n_layers}; only heads of one layer are supported"
        )
    check_heads(f"{name}: config.json", model)
    return HeadConfig(model, _aux_layers(data, eagle, name, target.n_layers), bool(data.get("norm_before_residual")))


def _aux_layers(data: dict[str, Any], eagle: dict[str, Any], name: str, layers: int) -> tuple[int, ...]:
    """Layers whose input is read: EAGLE-3's own three unless the configuration names others.

    vLLM's top-level field numbers them in the same way. Inside ``eagle_config``, SGLang and SpecForge number the layers
    whose *output* is read, one less.
    """
    usual = (2, layers // 2, layers - 3)
    given, shift, field = data.get(_AUX_LAYERS_KEY), 0, _AUX_LAYERS_KEY
    if not given and eagle.get(_AUX_LAYERS_KEY):
        given, field = eagle[_AUX_LAYERS_KEY], f"eagle_config.{_AUX_LAYERS_KEY}"
        shift = 0 if given == list(usual) else 1
    if given is not None and not (isinstance(given, list) and all(type(i) is int for i in given)):
        raise ModelError(f"{name}: config.json: '{field}' must be a list of layer numbers, got {given!r}")
    aux_layers = tuple(i + shift for i in given) if given else usual
    if not all(0 <= at < layers for at in aux_layers):
        raise ModelError(
            f"{name}: the head reads the inputs of layers {list(aux_layers)}, the target has {layers} layers; "
            "use a head trained for this target"
        )
    return aux_layers


_BIN = "pytorch_model.bin"


class HeadTensors:
    """Named tensors of a checkpoint folder, by EAGLE's names (``midlayer.*``, without ``model.``).

    paths: the files that hold them.

    Raises:
        ModelError: there are no weights, or they are truncated or corrupt.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: dict[str, Tensor] = {}
        self._files: dict[str, Any] = {}
        if not any(folder.glob("*.safetensors")) and (folder / _BIN).exists():
            self.paths = [folder / _BIN]
            self._loaded = _read_bin(folder / _BIN)
            self._stored = _stored_names(self._loaded)
            return
        shards = open_shards(folder)
        self.paths = list(shards)
        self._files = {name: file for file in shards.values() for name in file.keys()}  # noqa: SIM118
        self._stored = _stored_names(self._files)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
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
        """``name`` as float32; ModelError if it is missing or unreadable, UnsupportedModelError if it is quantised."""
        tensor = self._read(name)
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UnsupportedModelError(
                f"{self._folder}: tensor {name} has type {tensor.dtype}; use a head in bf16, fp16 or fp32"
            )
        return tensor.float().contiguous()

    def integers(self, name: str) -> Tensor:
        """``name`` (integer or bool) as int64; ModelError if it is missing, unreadable or of another type."""
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
        with readable(self._folder, name):
            tensor: Tensor = self._files[stored].get_tensor(stored)
            return tensor


def _stored_names(stored: Iterable[str]) -> dict[str, str]:
    """EAGLE's name of each tensor -> its name in the file; vLLM and SpecForge write ``layers.0.``."""
    names = {}
    for name in stored:
        plain = name.removeprefix("model.")
        names["midlayer." + plain.removeprefix("layers.0.") if plain.startswith("layers.0.") else plain] = name
    return names


def _read_bin(path: Path) -> dict[str, Tensor]:
    check_regular(path)
    try:
        # weights_only: a pickle from the network must not run code
        data = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{path}: truncated, corrupt or not plain tensors ({reason}); fetch the head again") from None
    if not isinstance(data, dict) or not all(isinstance(value, Tensor) for value in data.values()):
        raise ModelError(f"{path}: must hold a dictionary of tensors; fetch the head again")
    return data


@dataclass(frozen=True, slots=True)
class HeadModel:
    """An EAGLE-3 head (Li et al., arXiv 2503.01840), packed. h is its hidden size; norms are float32 [h]."""

    name: str
    config: HeadConfig
    target_vocab: int
    embed: Tensor  # [>= target vocabulary, h], float16 or float32
    fc: PackedLinear  # from a token's auxiliary hidden states to h
    embed_norm: Tensor
    hidden_norm: Tensor
    qkv: PackedLinear  # rows [q; k; v] over 2h inputs [embedding; hidden]
    o: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear  # rows [gate; up]
    down: PackedLinear
    final_norm: Tensor
    lm_head: PackedLinear  # [draft vocabulary, h]
    target_ids: Tensor | None  # int64 [draft vocabulary]: the target's id of each draft id; None: the same id
    digest: str  # of the checkpoint's files and the type of the packed weights; the same in every process

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The ``aux_layers`` of the target's `Decoder`."""
        return self.config.aux_layers


_ATTENTION, _MLP = "midlayer.self_attn.", "midlayer.mlp."
_NORMS = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
_BIASED = ("fc", *(_ATTENTION + f"{part}_proj" for part in "qkvo"))
_OPTIONAL = {"embed_tokens.weight", "d2t", "t2d", *(name + ".bias" for name in _BIASED)}
_BYTES = {"int8": 1, "bf16": 2, "fp32": 4}  # bytes per packed value


def load_head(folder: Path, *, dtype: Dtype, target: ModelConfig, target_embed: Tensor) -> HeadModel:
    """Read and pack the head in ``folder``: config.json, and safetensors or pytorch_model.bin.

    target_embed: the target's embedding, used if the checkpoint has none.

    Raises:
        ModelError: a tensor or field is missing, damaged or made for another target, or memory is insufficient.
        UnsupportedModelError: the checkpoint has another architecture.
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
        self._dtype: RoundedKind = "int8" if dtype == "auto" else dtype
        self._target = target

    def check(self) -> None:
        """Raise unless every expected tensor exists with the right shape, and there is no unknown tensor."""
        expected = self._expected()
        others = [n for n in self._tensors.names if n not in expected and n not in _OPTIONAL and "rotary_emb" not in n]
        if others:
            raise UnsupportedModelError(f"{self._folder}: tensor {min(others)} is none of EAGLE-3's layer; {_WAY_OUT}")
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
                    f"{len(self._config.aux_layers)} features of the target's hidden size {self._target.hidden_size}; "
                    "use a head trained for this target"
                )
            self._check_shape(name, found, shape)
            bias = name.removesuffix(".weight") + ".bias"
            if self._tensors.has(bias):
                self._check_shape(bias, self._tensors.shape(bias), shape[:1])
        size = sum(math.prod(shape) for shape in expected.values()) * _BYTES[self._dtype]
        check_memory(str(self._folder), size, self._dtype)

    def load(self, target_embed: Tensor) -> HeadModel:
        """The packed head."""
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
            digest=f"{fingerprint_files([self._folder / 'config.json', *self._tensors.paths])} {self._dtype}",
        )

    def _expected(self) -> dict[str, tuple[int, ...]]:
        c = self._config.model
        hidden, ffn = c.hidden_size, c.intermediate_size
        matrices: dict[str, tuple[int, ...]] = {
            "fc": (hidden, len(self._config.aux_layers) * self._target.hidden_size),
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
        """The target's ids from ``d2t`` (offsets) or ``t2d`` (a mask of the target's ids), else the identity."""
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
