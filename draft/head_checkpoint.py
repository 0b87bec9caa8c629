"""Loads an EAGLE-3 head for a target: configuration, tensors, packed weights."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.config import Dtype
from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.checkpoint import check_regular, fingerprint_files, finite, read_json, well_formed
from specdec.models.config import ModelConfig
from specdec.models.hf import open_shards, parse_hf_config, readable
from specdec.models.memory import check_memory
from specdec.models.pack import check_dimensions
from specdec.models.weights import LayerWeights
from verify_kernels.packed_weights import PackedLinear, RoundedKind, pack_linear

_MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral")  # of heads; they differ in tensors only
_AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
_WAY_OUT = "use an EAGLE-3 or EAGLE-3.1 head with Llama-style layers"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Shape and numerics of a head."""

    model: ModelConfig  # the layers, as a decoder
    aux_layers: tuple[int, ...]  # the target's layers whose inputs are the head's features, in order
    residual_normed: bool  # the first attention's residual is the normed hidden state instead of the plain one
    output_normed: bool  # EAGLE-3.1: the next slot gets the hidden state after the final norm instead of before it
    features_norms: tuple[str, ...]  # norms before `fc`: none, one over all features, or one a layer (EAGLE-3.1)
    draft_vocab: int | None  # rows of the output table as config.json gives them
    acceptance: tuple[float, ...]  # by position from 1: share of proposed tokens accepted after training; may be empty


def is_head(ref: str | Path) -> bool:
    """Whether the folder ``ref`` holds a feature head by its config.json, of a supported kind or not; False: a model,
    or nothing that can be read."""
    try:
        raw = read_json(Path(os.path.expanduser(ref)) / "config.json")
    except ModelError:
        return False
    return "speculators_model_type" in raw or "eagle" in str(raw.get("architectures")).lower()


def parse_head_config(raw: dict[str, Any], name: str, target: ModelConfig) -> HeadConfig:
    """The head's shape from its parsed ``config.json``, in its plain form or in that of vLLM's speculators.

    Raises:
        UnsupportedModelError: another kind of head.
        ModelError: a field is missing, malformed, out of range or does not fit the target.
    """
    with well_formed(f"{name}: config.json"):
        return _read_config(raw, name, target)


def _read_config(raw: dict[str, Any], name: str, target: ModelConfig) -> HeadConfig:
    data = raw | raw.get("transformer_layer_config", {})
    kind = data.get("model_type", "llama")
    if kind not in _MODEL_TYPES and "transformer_layer_config" not in raw:
        raise UnsupportedModelError(f"{name}: config.json: model_type '{kind}' is not supported; {_WAY_OUT}")
    algorithm = raw.get("speculators_model_type", "eagle3")
    if algorithm != "eagle3":
        raise UnsupportedModelError(
            f"{name}: config.json: speculators_model_type '{algorithm}' is not supported; {_WAY_OUT}"
        )
    if data.get("parallel_drafting"):
        raise UnsupportedModelError(f"{name}: config.json: 'parallel_drafting' is not supported; {_WAY_OUT}")
    if "sliding_attention" in (data.get("layer_types") or ()):
        raise UnsupportedModelError(
            f"{name}: config.json: 'layer_types' names sliding_attention, which heads do not support; "
            "use a head with full attention"
        )
    eagle = data.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state") is False:
        raise UnsupportedModelError(f"{name}: config.json: use_aux_hidden_state is false; {_WAY_OUT}")
    model = parse_hf_config(data | {"model_type": "llama"}, name)
    check_dimensions(f"{name}: config.json", model)
    aux_layers = _aux_layers(data, eagle, name, target.n_layers)
    return HeadConfig(
        model,
        aux_layers,
        residual_normed=bool(data.get("norm_before_residual")),
        output_normed=bool(data.get("norm_output")),
        features_norms=_features_norms(data, len(aux_layers)),
        draft_vocab=data.get("draft_vocab_size"),
        acceptance=_acceptance(raw, name),
    )


def _features_norms(data: dict[str, Any], layers: int) -> tuple[str, ...]:
    if data.get("fc_norm"):
        return tuple(f"fc_norm.{at}" for at in range(layers))
    return ("input_norm",) if data.get("norm_before_fc") else ()


def _acceptance(raw: dict[str, Any], name: str) -> tuple[float, ...]:
    """The list that `specdec train-head` writes; other publishers' heads have none."""
    given = (raw.get("specdec") or {}).get("acceptance", [])
    if not isinstance(given, list) or not all(isinstance(p, float | int) and 0 <= p <= 1 for p in given):
        raise ModelError(
            f"{name}: config.json: 'specdec.acceptance' must be a list of shares from 0 to 1, got {given!r}"
        )
    return tuple(map(float, given))


def usual_aux_layers(layers: int) -> tuple[int, ...]:
    """The layers of a target of ``layers`` layers whose inputs EAGLE-3 reads: a low, a middle and a high one."""
    return min(2, layers - 1), layers // 2, max(layers - 3, 0)


def _aux_layers(data: dict[str, Any], eagle: dict[str, Any], name: str, layers: int) -> tuple[int, ...]:
    """Layers whose input is read: EAGLE-3's own three unless the configuration names others.

    vLLM's top-level field numbers them in the same way. Inside ``eagle_config``, SGLang and SpecForge number the layers
    whose *output* is read, one less.
    """
    usual = usual_aux_layers(layers)
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


def read_tensors(folder: Path) -> tuple[dict[str, Tensor], list[Path]]:
    """The tensors of a checkpoint folder by vLLM's names (``layers.N.*``, without ``model.``), and the files that hold
    them. Tensors of safetensors are views of the mapped files.

    Raises:
        ModelError: there are no weights, or they are truncated or corrupt.
    """
    if not any(folder.glob("*.safetensors")) and (folder / _BIN).exists():
        stored = _read_bin(folder / _BIN)
        return {_vllm_name(name): tensor for name, tensor in stored.items()}, [folder / _BIN]
    shards = open_shards(folder)
    tensors = {}
    for file in shards.values():
        for name in file.keys():  # noqa: SIM118
            with readable(folder, name):
                tensors[_vllm_name(name)] = file.get_tensor(name)
    return tensors, list(shards)


def _vllm_name(stored: str) -> str:
    """A tensor's name in vLLM's numbering, ``layers.N.``; EAGLE's one layer is ``midlayer.``."""
    plain = stored.removeprefix("model.")
    return "layers.0." + plain.removeprefix("midlayer.") if plain.startswith("midlayer.") else plain


def _read_bin(path: Path) -> dict[str, Tensor]:
    check_regular(path)
    try:
        # weights_only: a pickle from the network must not run code
        data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises what damaged instructions lead to, such as KeyError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{path}: truncated, corrupt or not plain tensors ({reason}); fetch the head again") from None
    if not isinstance(data, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in data.items()):
        raise ModelError(f"{path}: must hold a dictionary of tensors by name; fetch the head again")
    return data


@dataclass(frozen=True, slots=True)
class HeadModel:
    """An EAGLE-3 head (Li et al., arXiv 2503.01840), packed. h is its hidden size; norms are float32 [h]."""

    config: HeadConfig
    target_vocab: int
    embed: Tensor  # [>= target vocabulary, h], float16 or float32
    features_norm: Tensor | None  # [n, k / n], one row for each of `HeadConfig.features_norms`, of the k inputs of `fc`
    fc: PackedLinear  # from a token's auxiliary hidden states to h
    embed_norm: Tensor
    layers: tuple[LayerWeights[PackedLinear], ...]  # in the first, qkv is over 2h inputs, [embedding; hidden]
    final_norm: Tensor
    lm_head: PackedLinear  # [draft vocabulary, h]
    target_ids: Tensor | None  # int64 [draft vocabulary]: the target's id of each draft id; None: the same id
    digest: str  # of the checkpoint's files and the type of the packed weights; the same in every process


_EMBED_NORM, _FIRST_NORM = "layers.0.input_layernorm", "layers.0.hidden_norm"
_TRAINING_ONLY = {"verifier_lm_head.weight", "verifier_norm.weight"}  # the target's own, in some speculators files
_NOT_PACKED = {"embed_tokens.weight", "d2t", "t2d"} | _TRAINING_ONLY
_LAYER_TENSORS = (
    r"(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)\.(?:weight|bias)"
    r"|(?:self_attn\.[qk]_norm|hidden_norm|input_layernorm|post_attention_layernorm)\.weight"
)
_BYTES = {"auto": 1, "int8": 1, "bf16": 2, "fp32": 4}  # bytes per packed value


def head_bytes(tensors: Mapping[str, Tensor], dtype: Dtype) -> int:
    """Bytes of a head's packed matrices, and of its embedding, if it has its own. tensors: as from `read_tensors`."""
    packed = sum(t.numel() for name, t in tensors.items() if t.dim() == 2 and name not in _NOT_PACKED)
    embed = tensors["embed_tokens.weight"].numel() if "embed_tokens.weight" in tensors else 0
    return packed * _BYTES[dtype] + embed * (4 if dtype == "fp32" else 2)


def load_head(folder: Path, *, dtype: Dtype, target: ModelConfig, target_embed: Tensor) -> HeadModel:
    """Read and pack the head in ``folder``: config.json, and safetensors or pytorch_model.bin.

    target_embed: the target's embedding, used if the checkpoint has none.

    Raises:
        ModelError: a tensor or field is missing, damaged or made for another target, or memory is insufficient.
        UnsupportedModelError: the checkpoint has another architecture.
    """
    config = parse_head_config(read_json(folder / "config.json"), str(folder), target)
    return _Loader(folder, config, dtype, target).load(target_embed)


class _Loader:
    def __init__(self, folder: Path, config: HeadConfig, dtype: Dtype, target: ModelConfig) -> None:
        self._folder, self._config = folder, config
        self._tensors, self._paths = read_tensors(folder)
        self._dtype: RoundedKind = "int8" if dtype == "auto" else dtype
        self._target = target
        self._normed = any(name.endswith(("q_norm.weight", "k_norm.weight")) for name in self._tensors)

    def load(self, target_embed: Tensor) -> HeadModel:
        """The packed head. Every tensor is checked as it is read."""
        self._check_names()
        if _FIRST_NORM + ".weight" not in self._tensors:
            raise UnsupportedModelError(
                f"{self._folder}: tensor {_FIRST_NORM}.weight is missing, so this is no EAGLE-3 head "
                "(EAGLE and EAGLE-2 heads have none); use an EAGLE-3 one"
            )
        check_memory(str(self._folder), head_bytes(self._tensors, self._dtype), self._dtype)
        hidden, norms = self._config.model.hidden_size, self._config.features_norms
        width = len(self._config.aux_layers) * self._target.hidden_size
        return HeadModel(
            config=self._config,
            target_vocab=self._target.vocab_size,
            embed=self._embed(target_embed),
            features_norm=torch.stack([self._norm(name, width // len(norms)) for name in norms]) if norms else None,
            fc=self._linear({"fc": hidden}, width),
            embed_norm=self._norm(_EMBED_NORM, hidden),
            layers=tuple(self._layer(at) for at in range(self._config.model.n_layers)),
            final_norm=self._norm("norm", hidden),
            lm_head=self._linear({"lm_head": self._rows}, hidden),
            target_ids=self._target_ids(),
            digest=f"{fingerprint_files([self._folder / 'config.json', *self._paths])} {self._dtype}",
        )

    def _check_names(self) -> None:
        """Raise if there is a tensor that no such head has: first, because another kind of head lacks others too."""
        layers = "|".join(map(str, range(self._config.model.n_layers)))
        names = re.compile(rf"(?:fc|lm_head)\.(?:weight|bias)|norm\.weight|layers\.(?:{layers})\.(?:{_LAYER_TENSORS})")
        known = _NOT_PACKED | {name + ".weight" for name in self._config.features_norms}
        others = [n for n in self._tensors if n not in known and "rotary_emb" not in n and not names.fullmatch(n)]
        if others:
            raise UnsupportedModelError(
                f"{self._folder}: tensor {min(others)} belongs to no layer that config.json describes; {_WAY_OUT}"
            )

    def _layer(self, at: int) -> LayerWeights[PackedLinear]:
        c, attention, mlp = self._config.model, f"layers.{at}.self_attn.", f"layers.{at}.mlp."
        q, hidden, ffn = c.q_size, c.hidden_size, c.intermediate_size
        # Only the first layer also norms an embedding, and reads it.
        attn_norm = f"layers.{at}.input_layernorm" if at else _FIRST_NORM
        rows = {attention + "q_proj": q, attention + "k_proj": c.kv_size, attention + "v_proj": c.kv_size}
        return LayerWeights(
            attn_norm=self._norm(attn_norm, hidden),
            qkv=self._linear(rows, hidden if at else 2 * hidden),
            q_norm=self._norm(attention + "q_norm", c.head_dim) if self._normed else None,
            k_norm=self._norm(attention + "k_norm", c.head_dim) if self._normed else None,
            o=self._linear({attention + "o_proj": hidden}, q),
            attn_post_norm=None,
            mlp_norm=self._norm(f"layers.{at}.post_attention_layernorm", hidden),
            gate_up=self._linear({mlp + "gate_proj": ffn, mlp + "up_proj": ffn}, hidden),
            down=self._linear({mlp + "down_proj": hidden}, ffn),
            mlp_post_norm=None,
        )

    @property
    def _rows(self) -> int:
        """Rows of the output table: tokens of the draft vocabulary."""
        return next(iter(self._tensors["lm_head.weight"].shape), 0) if "lm_head.weight" in self._tensors else 0

    def _check_shape(self, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape and name == "fc.weight":
            raise ModelError(
                f"{self._folder}: tensor fc.weight has shape {list(found)}, {list(shape)} is called for: "
                f"{len(self._config.aux_layers)} features of the target's hidden size {self._target.hidden_size}; "
                "use a head trained for this target"
            )
        if found != shape:
            raise ModelError(
                f"{self._folder}: tensor {name} has shape {list(found)}, config.json calls for {list(shape)}; "
                "the checkpoint is damaged, fetch it again"
            )

    def _floats(self, name: str, *shape: int) -> Tensor:
        """``name`` as float32, a tensor of ``shape``; UnsupportedModelError if it is quantised."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(
                f"{self._folder}: tensor {name} is missing; the download is incomplete or this is no EAGLE-3 head"
            )
        self._check_shape(name, tuple(tensor.shape), shape)
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UnsupportedModelError(
                f"{self._folder}: tensor {name} has type {tensor.dtype}; use a head in bf16, fp16 or fp32"
            )
        return finite(str(self._folder), name, tensor.float().contiguous())

    def _integers(self, name: str) -> Tensor:
        """``name`` (integer or bool) as int64; ModelError if it is of another type."""
        tensor = self._tensors[name]
        if tensor.is_floating_point() or tensor.is_complex():
            raise ModelError(
                f"{self._folder}: tensor {name} has type {tensor.dtype}, not an integer one; fetch the head again"
            )
        return tensor.long()

    def _norm(self, name: str, width: int) -> Tensor:
        return self._floats(name + ".weight", width)

    def _linear(self, rows: Mapping[str, int], columns: int) -> PackedLinear:
        """The matrices of the names in ``rows``, one below the other, each of so many rows."""
        weights = [self._floats(name + ".weight", n, columns) for name, n in rows.items()]
        bias = None
        if any(name + ".bias" in self._tensors for name in rows):
            bias = torch.cat([self._bias(name + ".bias", n) for name, n in rows.items()])
        return pack_linear(weights[0] if len(weights) == 1 else torch.cat(weights), bias, self._dtype)

    def _bias(self, name: str, rows: int) -> Tensor:
        return self._floats(name, rows) if name in self._tensors else torch.zeros(rows)

    def _embed(self, target_embed: Tensor) -> Tensor:
        hidden, name = self._config.model.hidden_size, "embed_tokens.weight"
        if name not in self._tensors:
            if target_embed.shape[1] != hidden:
                raise ModelError(
                    f"{self._folder}: tensor {name} is missing, and the target's is {target_embed.shape[1]} wide where "
                    f"the head needs {hidden}; use a head that holds its own embedding or one made for this target"
                )
            return target_embed
        found = tuple(self._tensors[name].shape)
        if len(found) != 2 or found[0] < self._target.vocab_size or found[1] != hidden:
            raise ModelError(
                f"{self._folder}: tensor {name} has shape {list(found)}, [{self._target.vocab_size}, {hidden}] is "
                "called for; use a head trained for this target"
            )
        return self._floats(name, *found).to(torch.float32 if self._dtype == "fp32" else torch.float16)

    def _target_ids(self) -> Tensor | None:
        """The target's ids from ``d2t`` (offsets) or ``t2d`` (a mask of the target's ids), else the identity."""
        rows, vocab = self._rows, self._target.vocab_size
        own = torch.arange(rows)
        if "d2t" in self._tensors:
            self._check_shape("d2t", tuple(self._tensors["d2t"].shape), (rows,))
            name, ids = "d2t", own + self._integers("d2t")
        elif "t2d" in self._tensors and rows != vocab:
            name, ids = "t2d", self._integers("t2d").nonzero().flatten()
            self._check_shape("t2d: the ids it names", tuple(ids.shape), (rows,))
        elif self._config.draft_vocab not in (None, self._config.model.vocab_size):
            raise ModelError(
                f"{self._folder}: tensor d2t is missing, and config.json cuts the vocabulary to 'draft_vocab_size' "
                f"{self._config.draft_vocab}; use a head that holds d2t or t2d"
            )
        else:
            name, ids = "lm_head.weight", own
        if rows == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab:
            raise ModelError(
                f"{self._folder}: tensor {name} leads to token ids outside the target's vocabulary of {vocab}; "
                "use a head trained for this target"
            )
        return None if torch.equal(ids, torch.arange(vocab)) else ids
