"""Reads a Hugging Face model folder: config.json with its quantisation, and safetensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import SafetensorError, safe_open

from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.checkpoint import TensorSource, check_regular, expert_of, positive_int, read_json, well_formed
from specdec.models.config import MAX_EXPERTS, MAX_LAYERS, ModelConfig, RopeConfig, longrope_scaling, yarn_magnitude

if TYPE_CHECKING:
    from torch import Tensor

QuantMethod = Literal["awq", "gptq", "compressed-tensors"]
WAY_OUT = "use the unquantised model, an AWQ, GPTQ or compressed-tensors model of 4 bits, or a GGUF file"
BITS: dict[QuantMethod, tuple[int, ...]] = {"awq": (4,), "gptq": (4, 8), "compressed-tensors": (4, 8)}
GPTQ_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # the first format stores zero points less one


@dataclass(frozen=True, slots=True)
class QuantizedConfig:
    """How a folder's quantised matrices are stored."""

    method: QuantMethod
    bits: int  # per weight
    group_size: int  # input channels that share a scale; -1: all of them
    zero_offset: int = 0  # added to stored zero points
    symmetric: bool = False  # no zero points are stored; half the range stands for zero
    act_order: bool = False  # the file says which group each input channel belongs to

    @property
    def per_word(self) -> int:
        """Values in 32 bits."""
        return 32 // self.bits


def parse_quantized_config(data: Any, name: str) -> QuantizedConfig:
    """The ``quantization_config`` of config.json; ``name`` is the model's in messages.

    Raises:
        UnsupportedModelError: the layout is not supported; the text names the field.
    """
    data = data if isinstance(data, dict) else {}
    method, where = data.get("quant_method"), f"{name}: quantization_config"
    _check(where, "quant_method", method, *BITS)
    where = f"{where} ({method})"
    found = _READERS[method](data, where)
    _check(where, "bits", found.bits, *BITS[method])
    group = found.group_size
    if not isinstance(group, int) or isinstance(group, bool) or (group < 1 and group != -1):
        raise UnsupportedModelError(f"{where}: group_size is {group!r}; must be positive or -1, {WAY_OUT}")
    return found


def _check(where: str, field: str, value: Any, *supported: Any) -> None:
    if value not in supported:
        known = " or ".join(map(str, supported))
        raise UnsupportedModelError(f"{where}: {field} {value!r} is not supported; only {known} is, {WAY_OUT}")


def _compressed(data: dict[str, Any], where: str) -> QuantizedConfig:
    """How a compressed-tensors folder holds its matrices; all of them must be held alike."""
    _check(where, "format", data.get("format"), "pack-quantized")
    if data.get("transform_config"):  # weights and activations rotated
        raise UnsupportedModelError(f"{where}: transform_config is not supported; {WAY_OUT}")
    sparsity = data.get("sparsity_config") or {}
    stored = sparsity.get("format") if isinstance(sparsity, dict) else sparsity
    _check(where, "sparsity_config.format", stored or "dense", "dense")
    schemes = data.get("config_groups")
    found = [
        scheme.get("weights") if isinstance(scheme, dict) else scheme
        for scheme in (schemes.values() if isinstance(schemes, dict) else ())
    ]
    weights = found[0] if found else None
    if not isinstance(weights, dict) or any(each != weights for each in found):
        raise UnsupportedModelError(f"{where}: config_groups must give one way to hold all weights; {WAY_OUT}")
    strategy = weights.get("strategy")
    _check(where, "strategy", strategy, "group", "channel")
    _check(where, "type", weights.get("type", "int"), "int")
    return QuantizedConfig(
        "compressed-tensors",
        weights.get("num_bits", 0),
        weights.get("group_size", 0) if strategy == "group" else -1,
        symmetric=weights.get("symmetric", True) is not False,
        act_order=weights.get("actorder") in ("group", "dynamic"),
    )


def _awq(data: dict[str, Any], where: str) -> QuantizedConfig:
    _check(where, "version", str(data.get("version", data.get("format")) or "gemm").lower(), "gemm")
    _check(where, "zero_point", data.get("zero_point") is not False, True)
    return QuantizedConfig("awq", data.get("bits", 0), data.get("group_size", 0))


def _gptq(data: dict[str, Any], where: str) -> QuantizedConfig:
    layout = data.get("checkpoint_format", data.get("format")) or "gptq"
    _check(where, "checkpoint_format", "marlin" if data.get("is_marlin_format") else layout, *GPTQ_ZERO_OFFSETS)
    if data.get("dynamic"):  # bits by module
        raise UnsupportedModelError(f"{where}: dynamic is not supported; {WAY_OUT}")
    _check(where, "pack_dtype", data.get("pack_dtype", "int32"), "int32")
    offset, act_order = GPTQ_ZERO_OFFSETS[layout], bool(data.get("desc_act"))
    return QuantizedConfig("gptq", data.get("bits", 0), data.get("group_size", 0), offset, act_order=act_order)


_READERS: dict[QuantMethod, Callable[[dict[str, Any], str], QuantizedConfig]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
}


# Holds a language model of type mistral, or of a later one. Other multimodal folders are refused: their chat templates
# take contents in parts.
_MISTRAL_WITH_IMAGES = "mistral3"

# By model_type, defaults of its configuration class in transformers; published configs omit such fields
_COMMON = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 10_000.0, "hidden_act": "silu"}
_QWEN: dict[str, Any] = {"sliding_window": 4096, "max_window_layers": 28}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "ministral3": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "qwen3_moe": {
        **_QWEN,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    "gemma": {
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    "mixtral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "granite": {"max_position_embeddings": 2048},
    "granitemoe": {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
    "smollm3": {
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
    "seed_oss": {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288},
    "phi3": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "sliding_window": None},
}
_SCORING = ("Classification", "RewardModel")  # ends of the names of classes with another head
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def parse_hf_config(data: dict[str, Any], name: str) -> ModelConfig:
    """The model's shape from the parsed ``config.json``; ``name`` is the model's in messages.

    Whether there is a bias is left to the tensors (`HFSource`).

    Raises:
        UnsupportedModelError: the family, its activation, rope scaling or quantisation is not supported.
        ModelError: a field is missing or out of range.
    """
    with well_formed(f"{name}: config.json"):
        model_type = str(data.get("model_type", "(none)"))
        if model_type == _MISTRAL_WITH_IMAGES:
            model_type = str(language_model(data).get("model_type"))
        family = "gemma3" if model_type == "gemma3_text" else model_type
        if family not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            raise UnsupportedModelError(f"{name}: model type '{model_type}' is not supported; use a model of {known}")
        return _read_config(data, name, family)


def _read_config(data: dict[str, Any], name: str, family: str) -> ModelConfig:
    if data.get("quantization_config") is not None:
        parse_quantized_config(data["quantization_config"], name)  # refused here, before any weights are looked at
    scores = next((each for each in data.get("architectures") or () if str(each).endswith(_SCORING)), None)
    if scores is not None:
        raise UnsupportedModelError(f"{name}: is a {scores}, which scores texts; use a model that ends in ForCausalLM")
    data = language_model(data)
    # A null means "the default", but for the window: there it means that the model has none.
    said = {k: v for k, v in data.items() if v is not None or k == "sliding_window"}
    return _Reader(name, family, _COMMON | FAMILIES[family] | said).read()


def language_model(data: dict[str, Any]) -> dict[str, Any]:
    """The part of ``config.json``, parsed, that is about the language model; all of it unless it is multimodal."""
    if "text_config" not in data:
        return data
    outer = {k: v for k, v in data.items() if k in ("bos_token_id", "eos_token_id", "tie_word_embeddings")}
    return outer | data["text_config"]


@dataclass(frozen=True)
class _Reader:
    name: str
    family: str
    data: dict[str, Any]

    def read(self) -> ModelConfig:
        self._refuse_unsupported()
        hidden = self._int("hidden_size")
        heads = self._int("num_attention_heads")
        layers = self._int("num_hidden_layers", most=MAX_LAYERS)
        head_dim = self._int("head_dim", hidden // heads)
        window, local = self._layers(layers)
        moe, rope = self.family in ("qwen3_moe", "mixtral", "granitemoe"), self._rope(head_dim)
        # Queries are multiplied by a function of their position, which is 1 in the original context.
        given = (self.data.get("rope_parameters") or {}) | (self.data.get("rope_scaling") or {})
        positions_scale = given.get("llama_4_scaling_beta")
        attn_scale = float(self.data.get("query_pre_attn_scalar", head_dim)) ** -0.5
        embed_scale = math.sqrt(hidden) if self.family in ("gemma", "gemma3") else 1.0
        config = ModelConfig(
            family=self.family,
            vocab_size=self._int("vocab_size"),
            hidden_size=hidden,
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=self._int("num_key_value_heads", heads),
            head_dim=head_dim,
            intermediate_size=self._int("moe_intermediate_size" if self.family == "qwen3_moe" else "intermediate_size"),
            max_context=rope.original_context
            if positions_scale
            else rope.max_context(self._int("max_position_embeddings")),
            norm_eps=float(self.data["rms_norm_eps"]),
            rope=rope,
            attn_scale=self._factor("attention_multiplier", attn_scale),
            activation=self._activation(),
            embed_scale=self._factor("embedding_multiplier", embed_scale),
            logits_divisor=self._factor("logits_scaling", 1.0),
            tie_embeddings=bool(self.data.get("tie_word_embeddings", False)),
            qk_norm=self.family in ("qwen3", "qwen3_moe", "gemma3"),
            post_norms=self.family == "gemma3",
            sliding_window=window,
            local_layers=local,
            mask_token=self._mask_token(),
            experts=self._experts() if moe else 0,
            experts_per_token=self._int("num_experts_per_tok") if moe else 0,
            normalise_experts=bool(self.data.get("norm_topk_prob", True)),
        )
        return config.with_residual_scale(self._factor("residual_multiplier", 1.0))

    def _refuse_unsupported(self) -> None:
        unsupported = ["final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"]
        if self.family == "smollm3":
            unsupported.append("use_sliding_window")
        for key in unsupported:
            if self.data.get(key):
                raise UnsupportedModelError(f"{self.name}: '{key}' is not supported; use another model")
        dense = self.data.get("mlp_only_layers") or self.data.get("decoder_sparse_step", 1) != 1
        if dense and self.family == "qwen3_moe":
            raise UnsupportedModelError(
                f"{self.name}: layers with and without experts are not supported; use another model"
            )
        if self.data.get("is_causal") is False:
            raise UnsupportedModelError(f"{self.name}: 'is_causal' false is not supported; use a causal model")

    def _int(self, key: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        return positive_int(f"{self.name}: config.json: '{key}'", self.data.get(key, default), most)

    def _factor(self, key: str, default: float) -> float:
        """A factor of Granite's; ``default`` in other families."""
        return float(self.data.get(key, 1.0)) if self.family in ("granite", "granitemoe") else default

    def _experts(self) -> int:
        written = "num_local_experts" in self.data  # by transformers 5
        return self._int("num_local_experts" if written else "num_experts", most=MAX_EXPERTS)

    def _mask_token(self) -> int | None:
        """The mark of a PARD draft model (An et al., arXiv 2504.18583)."""
        value, size = self.data.get("pard_token"), self._int("vocab_size")
        if value is not None and (type(value) is not int or not 0 <= value < size):
            raise ModelError(
                f"{self.name}: config.json: 'pard_token' must be a token below {size}, got {value!r}; correct it, or "
                "remove it to draft token by token"
            )
        return value

    def _activation(self) -> Any:
        given = self.data.get("hidden_activation", self.data["hidden_act"])
        # The first configurations of Gemma name the exact GELU, and mean the other one.
        activation = "gelu_tanh" if (self.family, given) == ("gemma", "gelu") else _ACTIVATIONS.get(given)
        if activation is None:
            raise UnsupportedModelError(f"{self.name}: activation '{given}' is not supported; use another model")
        return activation

    def _layers(self, layers: int) -> tuple[int | None, tuple[bool, ...]]:
        """The window and the local layers."""
        window, key = self.data.get("sliding_window"), "layer_types"
        if self.family.startswith("qwen") and not self.data.get("use_sliding_window", False):
            window = None
        if self.family == "smollm3":
            window, key, every = None, "no_rope_layers", self._int("no_rope_layer_interval")
            turned = self.data.get(key, [(i + 1) % every for i in range(layers)])
            flags = tuple(not each for each in turned[:layers])  # 1: rotary embedding, 0: none
        elif window is None or "sliding_window" not in FAMILIES[self.family]:
            return None, (False,) * layers
        elif key in self.data:
            flags = tuple(kind == "sliding_attention" for kind in self.data[key])
        elif self.family == "gemma3":
            flags = tuple((i + 1) % int(self.data["sliding_window_pattern"]) != 0 for i in range(layers))
        elif self.family in ("qwen2", "qwen3"):
            flags = tuple(i >= int(self.data["max_window_layers"]) for i in range(layers))
        else:
            flags = (True,) * layers
        if len(flags) != layers:
            raise ModelError(f"{self.name}: config.json: '{key}' has {len(flags)} entries for {layers} layers")
        return (int(window) if window is not None and any(flags) else None), flags

    def _rope(self, head_dim: int) -> RopeConfig:
        """Reads ``rope_parameters`` (transformers 5), and ``rope_scaling``: the former spelling, or added by hand."""
        given, added = (self.data.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
        if self.family == "gemma3":
            full = given.get("full_attention") or {}
            local = given.get("sliding_attention") or {}
            theta = (full | added).get("rope_theta", self.data["rope_theta"])
            local_theta = local.get("rope_theta", self.data.get("rope_local_base_freq", 10_000.0))
            if _scaling(local, self.name) is not None:
                raise UnsupportedModelError(f"{self.name}: rope scaling of sliding layers is not supported; remove it")
            return RopeConfig(float(theta), float(local_theta), _scaling(added or full, self.name))
        theta = (given | added).get("rope_theta", self.data["rope_theta"])
        partial = given.get("partial_rotary_factor", self.data.get("partial_rotary_factor", 1.0))
        if self.family == "phi3":
            rotated = int(head_dim * partial)
            return RopeConfig(float(theta), None, self._longrope(added or given), rotated=rotated)
        if partial != 1.0:
            raise UnsupportedModelError(f"{self.name}: partial rotary embedding is not supported; use another model")
        scaling = _scaling(added or given, self.name)
        return RopeConfig(float(theta), None, scaling, local_rotates=self.family != "smollm3")

    def _longrope(self, given: dict[str, Any]) -> tuple[str | float, ...] | None:
        if given.get("rope_type", given.get("type", "default")) not in ("longrope", "su", "yarn"):  # all its names
            return _scaling(given, self.name)
        context = self._int("max_position_embeddings")
        original = given.get("original_max_position_embeddings", self._int("original_max_position_embeddings", context))
        if given.get("factor"):
            context = original * given["factor"]
        return longrope_scaling(given["short_factor"], original, context, given.get("attention_factor"))


def _scaling(given: dict[str, Any], name: str) -> tuple[str | float, ...] | None:
    kind = given.get("rope_type", given.get("type", "default"))
    try:
        if kind == "default":
            return None
        if kind == "linear":
            return ("linear", float(given["factor"]))
        if kind == "llama3":
            fields = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            return ("llama3", *(float(given[field]) for field in fields))
        if kind == "yarn" and given.get("truncate", True):
            factor, original = float(given["factor"]), float(given["original_max_position_embeddings"])
            weights = float(given.get("mscale") or 0), float(given.get("mscale_all_dim") or 0)
            q, k = (yarn_magnitude(factor, weight) for weight in (weights if all(weights) else (1.0, 0.0)))
            turns = float(given.get("beta_fast") or 32), float(given.get("beta_slow") or 1)
            return ("yarn", factor, original, *turns, float(given.get("attention_factor") or q / k))
    except KeyError as missing:
        raise ModelError(f"{name}: config.json: {kind} rope scaling lacks {missing}") from None
    raise UnsupportedModelError(f"{name}: rope scaling '{kind}' is not supported; remove it to run at the base context")


_TOP = {"embed": "embed_tokens", "final_norm": "norm"}
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
    "router": "mlp.gate",
    "experts.gate": "mlp.experts.{}.gate_proj",
    "experts.up": "mlp.experts.{}.up_proj",
    "experts.down": "mlp.experts.{}.down_proj",
    "qkv": "self_attn.qkv_proj",
    "gate_up": "mlp.gate_up_proj",
}
_LAYER_BY_FAMILY = {  # where some names differ
    # Gemma has four norms around a layer, and gives one of the usual names to another of them.
    "gemma3": _LAYER
    | {
        "mlp_norm": "pre_feedforward_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "mixtral": _LAYER
    | {
        "router": "block_sparse_moe.gate",
        "experts.gate": "block_sparse_moe.experts.{}.w1",
        "experts.up": "block_sparse_moe.experts.{}.w3",
        "experts.down": "block_sparse_moe.experts.{}.w2",
    },
    "granitemoe": _LAYER
    | {
        "router": "block_sparse_moe.router.layer",
        "experts.gate_up": "block_sparse_moe.input_linear",
        "experts.down": "block_sparse_moe.output_linear",
    },
}
_HEADS = ("lm_head.weight", "lm_head.qweight", "lm_head.weight_packed")
_FLOATS = {"F32", "F16", "BF16"}


class HFSource(TensorSource):
    """A source over a model folder. Tensors are memory-mapped and converted slice by slice.

    framework: `numpy` for the configuration and shapes alone, which needs no torch.

    Raises:
        ModelError: config.json or the weights are missing, truncated or corrupt.
        UnsupportedModelError: the family or a tensor type is not supported.
    """

    def __init__(self, folder: Path, framework: Literal["pt", "numpy"] = "pt") -> None:
        self._folder = folder
        self.name = folder.name or str(folder)
        raw = read_json(folder / "config.json")
        config = parse_hf_config(raw, str(folder))
        files = open_shards(folder, framework).values()
        self._views = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118
        self._prefix = self._find_prefix()
        embed = self._prefix + "embed_tokens.weight"
        head = next((n for n in self._views if n.endswith(_HEADS)), None)
        self._head = None if head is None else head.rpartition(".")[0]
        if head is None and raw.get("tie_word_embeddings") is not False:
            config = replace(config, tie_embeddings=True)
        elif head is not None and config.tie_embeddings and embed not in self._views:
            self._views[embed] = self._views[head]  # `save_model` of safetensors keeps a shared tensor's first name
        elif config.tie_embeddings and framework == "pt" and self._head_differs():
            config = replace(config, tie_embeddings=False)  # as transformers does
        self._layer_names = _LAYER_BY_FAMILY.get(config.family, _LAYER)
        self.config = replace(
            config,
            vocab_size=self._slice(embed).get_shape()[0],
            qkv_bias=self._prefix + "layers.0.self_attn.q_proj.bias" in self._views,
        )

    def _head_differs(self) -> bool:
        """Whether there is an output table of the embedding's shape with other values: one that was trained apart."""
        name, embed = f"{self._head}.weight", self._prefix + "embed_tokens.weight"
        if name not in self._views or self.raw_shape(name) != self.raw_shape(embed):
            return False
        parts = (slice(low, low + 4096) for low in range(0, self.raw_shape(embed)[0], 4096))
        return any(bool((self.raw(name, part) != self.raw(embed, part)).any()) for part in parts)

    def has(self, role: str) -> bool:
        return self._tensor_name(role) in self._views

    def shape(self, role: str) -> tuple[int, ...]:
        return tuple(self._slice(self._tensor_name(role)).get_shape())[-2:]

    def rows(self, role: str, low: int, high: int) -> Tensor:
        name = self._tensor_name(role)
        with readable(self._folder, name):
            view = self._slice(name)
            holds_all = len(view.get_shape()) > 2  # experts of the layer
            values: Tensor = view[expert_of(role), low:high] if holds_all else view[low:high]
            return values.float().contiguous()

    def vector(self, role: str) -> Tensor:
        """Vector ``role``, float32; Gemma's norms, stored as w - 1, get their one back."""
        name = self._tensor_name(role)
        with readable(self._folder, name):
            values: Tensor = self._slice(name)[:].float()
        if self.config.family in ("gemma", "gemma3") and role.endswith("_norm"):
            values = values + 1.0
        return values / self.config.logits_divisor if role == "final_norm" else values

    def module(self, role: str) -> str:
        """The file's name of the module that holds matrix ``role``; its tensors are ``module.weight`` and the like."""
        return self._tensor_name(role).removesuffix(".weight")

    def holds(self, tensor: str) -> bool:
        """Whether the file holds a tensor of this name."""
        return tensor in self._views

    def raw_shape(self, tensor: str) -> tuple[int, ...]:
        """Shape of the tensor named ``tensor`` in the file; ModelError when it is missing."""
        return tuple(self._view(tensor).get_shape())

    def raw(self, tensor: str, rows: slice = slice(None), columns: slice | None = None) -> Tensor:
        """``rows`` and ``columns`` of the tensor named ``tensor`` in the file, of any type."""
        with readable(self._folder, tensor):
            view = self._view(tensor)
            values: Tensor = view[rows] if columns is None else view[rows, columns]
            return values

    def _tensor_name(self, role: str) -> str:
        role, kind = (role.removesuffix(".bias"), ".bias") if role.endswith(".bias") else (role, ".weight")
        if role == "lm_head":
            return (self._head or "lm_head") + kind
        if role in _TOP:
            return self._prefix + _TOP[role] + kind
        _, layer, *expert, part = role.split(".")
        if expert:
            part = f"experts.{part}"
        return f"{self._prefix}layers.{layer}.{self._layer_names.get(part, part).format(*expert[1:])}{kind}"

    def _view(self, tensor: str) -> Any:
        if tensor not in self._views:
            raise ModelError(f"{self._folder}: tensor {tensor} is missing; the download is incomplete, fetch it again")
        return self._views[tensor]

    def _slice(self, tensor: str) -> Any:
        view = self._view(tensor)
        if view.get_dtype() not in _FLOATS:
            raise UnsupportedModelError(
                f"{self._folder}: tensor {tensor} has type {view.get_dtype()}; use bf16, fp16 or fp32 weights, or GGUF"
            )
        return view

    def _find_prefix(self) -> str:
        for suffix in ("embed_tokens.weight", "layers.0.input_layernorm.weight"):
            if (found := next((name for name in self._views if name.endswith(suffix)), None)) is not None:
                return found.removesuffix(suffix)
        raise ModelError(f"{self._folder}: no token embedding among the weights; the model folder is incomplete")


@contextmanager
def readable(folder: Path, tensor: str) -> Iterator[None]:
    """ModelError for the errors of reading a tensor of a safetensors file in ``folder``."""
    try:
        yield
    except (SafetensorError, RuntimeError, OSError) as error:
        raise ModelError(f"{folder}: tensor {tensor} cannot be read ({error}); fetch it again") from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: model.safetensors, whatever else is there, as transformers has it; else
    those the index names; else all there are. ModelError when there are none."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        files = [whole]
    elif index.exists():
        with well_formed(str(index)):
            names = sorted({str(name) for name in read_json(index).get("weight_map", {}).values()})
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


def open_shards(folder: Path, framework: str = "pt") -> dict[Path, Any]:
    """The safetensors files of a model folder, open; ModelError if one is missing, truncated or corrupt.

    framework: see `HFSource`.
    """
    shards = {}
    for path in weight_files(folder):
        check_regular(path)
        try:
            shards[path] = safe_open(path, framework=framework)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: truncated or corrupt ({error}); fetch the model again") from None
    return shards
