"""Reads the configuration of an EAGLE-3 feature head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.hf_config import parse_hf_config
from specdec.models.load import MAX_HEAD_DIM
from specdec.models.model_config import ModelConfig

_TYPES = ("llama", "qwen2", "qwen3", "mistral")  # of the head: all of them write the same one layer
# Variants that share the tensors' names but not the equations
_VARIANTS = ("norm_before_fc", "norm_output", "fc_norm", "parallel_drafting")
_TAP_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Shape and numerics of a head.

    model: the one layer, as a decoder of one layer. taps: the target's layers whose inputs it reads, in order.
    residual_normed: the residual of the attention is the normed hidden state instead of the plain one.
    """

    model: ModelConfig
    taps: tuple[int, ...]
    residual_normed: bool


def parse_head_config(raw: dict[str, Any], name: str, target: ModelConfig) -> HeadConfig:
    """The head's shape from its parsed ``config.json``; both the plain form and the one of vLLM's speculators.

    Raises:
        UnsupportedModelError: another kind of head, or more than one layer.
        ModelError: a field is missing, has no sensible value or does not fit the target.
    """
    data = raw | raw.get("transformer_layer_config", {})
    kind = data.get("model_type", "llama")
    if kind not in _TYPES and "transformer_layer_config" not in raw:
        raise UnsupportedModelError(f"{name}: config.json: model_type '{kind}' is no head specdec runs; {_way_out()}")
    for flag in _VARIANTS:
        if data.get(flag):
            raise UnsupportedModelError(f"{name}: config.json: '{flag}' is not supported; {_way_out()}")
    eagle = data.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state") is False:
        raise UnsupportedModelError(f"{name}: config.json: use_aux_hidden_state is false; {_way_out()}")
    model = parse_hf_config(data | {"model_type": "llama"}, name)
    if model.n_layers != 1:
        raise UnsupportedModelError(
            f"{name}: config.json: num_hidden_layers is {model.n_layers}; only heads of one layer are supported"
        )
    if model.head_dim % 2 or model.head_dim > MAX_HEAD_DIM or model.n_heads % model.n_kv_heads:
        raise UnsupportedModelError(
            f"{name}: config.json: {model.n_heads} heads of {model.head_dim} over {model.n_kv_heads} KV heads are not "
            f"supported; heads must be even, at most {MAX_HEAD_DIM} wide, and a multiple of the KV heads"
        )
    return HeadConfig(model, _taps(data, eagle, name, target.n_layers), bool(data.get("norm_before_residual")))


def _taps(data: dict[str, Any], eagle: dict[str, Any], name: str, layers: int) -> tuple[int, ...]:
    """Layers whose input is read: EAGLE-3's own three, unless the configuration names others.

    vLLM's top-level field counts as we do; inside ``eagle_config``, SGLang and SpecForge count the layers whose
    *output* is read, one less.
    """
    usual = (2, layers // 2, layers - 3)
    given, shift, field = data.get(_TAP_KEY), 0, _TAP_KEY
    if not given and eagle.get(_TAP_KEY):
        given, field = eagle[_TAP_KEY], f"eagle_config.{_TAP_KEY}"
        shift = 0 if given == list(usual) else 1
    if given is not None and not (isinstance(given, list) and all(type(i) is int for i in given)):
        raise ModelError(f"{name}: config.json: '{field}' must be a list of layer numbers, got {given!r}")
    taps = tuple(i + shift for i in given) if given else usual
    if not all(0 <= tap < layers for tap in taps):
        raise ModelError(
            f"{name}: the head reads the inputs of layers {list(taps)}, the target has {layers} layers; "
            "use a head trained for this target"
        )
    return taps


def _way_out() -> str:
    return "use an EAGLE-3 head of one Llama-style layer"
