"""Reads a GGUF file: its metadata as a model's config, its memory-mapped tensors as a tensor source.

The `gguf` library's own reader keeps a numpy view per array element, which takes seconds for a vocabulary of
150,000 tokens, and does not notice a truncated file until a tensor is touched. Format: the GGUF specification in
the ggml repository, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.checkpoint import StoredBlocks, TensorSource, check_regular, expert_of, positive_int, well_formed
from specdec.models.config import MAX_EXPERTS, MAX_LAYERS, ModelConfig, RopeConfig, longrope_scaling, yarn_magnitude
from specdec.models.tokenizer import MAX_MERGES

if TYPE_CHECKING:
    from torch import Tensor

    from verify_kernels.packed_weights import BlockKind


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies in its file."""

    shape: tuple[int, ...]  # outermost dimension first; a row is the last one
    type: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    row_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape[:-1]) * self.row_bytes


_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9  # type codes of metadata values, as those above
_LENGTH = struct.Struct("<Q")
_TYPES = GGMLQuantizationType
_KEPT: tuple[BlockKind, ...] = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
_BLOCK_KINDS = {_TYPES[kind.upper()]: kind for kind in _KEPT}
_ROUNDED = (
    _TYPES.Q2_K, _TYPES.Q3_K, _TYPES.IQ2_XXS, _TYPES.IQ2_XS, _TYPES.IQ2_S, _TYPES.IQ3_XXS, _TYPES.IQ3_S,
    _TYPES.IQ4_NL, _TYPES.IQ4_XS,
)  # fmt: skip
"""Blocks that no kernel multiplies; they are dequantised as the file is read."""
SUPPORTED_TYPES = frozenset({_TYPES.F32, _TYPES.F16, _TYPES.BF16, *_BLOCK_KINDS, *_ROUNDED})


class GGUFFile:
    """An open GGUF file.

    Raises:
        ModelError: the file cannot be read, is no GGUF file, is truncated or corrupt.
        UnsupportedModelError: its version or byte order is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_regular(path)
        try:
            self._bytes = np.memmap(path, mode="r", dtype=np.uint8)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read ({error})") from None
        self._data = self._bytes.data
        self._at = len(_MAGIC)
        self.metadata: dict[str, Any] = {}  # int, float, bool, str, or a list of one of them
        self.tensors: dict[str, GGUFTensor] = {}  # by name
        try:
            self._read()
        except (struct.error, LookupError, OverflowError) as error:
            raise ModelError(f"{path}: truncated or corrupt GGUF header ({error}); fetch the file again") from None

    def raw_rows(self, name: str, index: np.ndarray | slice) -> np.ndarray:
        """A copy of the rows ``index`` of matrix ``name`` as stored: uint8 [rows, bytes of a row]."""
        tensor = self.tensors[name]
        raw = self._bytes[tensor.offset : tensor.offset + tensor.nbytes].reshape(-1, tensor.row_bytes)
        return np.array(raw[index])  # the mapping is read-only, and tensors must not be

    def supported(self, name: str) -> GGUFTensor:
        """Tensor ``name``; UnsupportedModelError if its type cannot be dequantised."""
        tensor = self.tensors[name]
        if tensor.type not in SUPPORTED_TYPES:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name} has type {tensor.type.name}; use a GGUF of one of "
                + ", ".join(sorted(kind.name for kind in SUPPORTED_TYPES))
            )
        return tensor

    def rows(self, name: str, index: np.ndarray | slice) -> np.ndarray:
        """The rows ``index`` of matrix ``name``, dequantised to float32 [rows, row length]."""
        tensor = self.supported(name)
        chosen = self.raw_rows(name, index)
        return np.ascontiguousarray(dequantize(chosen, tensor.type), dtype=np.float32)

    def _read(self) -> None:
        if bytes(self._data[: self._at]) != _MAGIC:
            raise ModelError(f"{self.path}: not a GGUF file; give one, or a Hugging Face model folder")
        version = self._scalar("I")
        if version not in (2, 3):
            found = "big-endian byte order" if version >> 24 else f"GGUF version {version}"
            raise UnsupportedModelError(
                f"{self.path}: {found} is not supported; convert it to version 3, little-endian"
            )
        n_tensors, n_keys = self._scalar("Q"), self._scalar("Q")
        for _ in range(n_keys):
            (key,) = self._strings(1)
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
            if 0 in shape:
                raise ModelError(f"{self.path}: tensor {name} is empty; the file is corrupt")
            row_bytes = shape[-1] // block * block_bytes
            tensor = self.tensors[name] = GGUFTensor(shape, kind, start + offset, row_bytes)
            if (end := tensor.offset + tensor.nbytes) > len(self._data):
                raise ModelError(
                    f"{self.path}: truncated: tensor {name} ends at byte {end}, the file has {len(self._data)}; "
                    "fetch it again"
                )
        if (len(self.tensors), len(self.metadata)) != (n_tensors, n_keys):
            raise ModelError(f"{self.path}: two tensors, or two metadata fields, share a name; the file is corrupt")

    def _tensor_place(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        (name,) = self._strings(1)
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

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _strings(self, count: int) -> list[str]:
        """``count`` strings. A vocabulary has 150,000 and as many merges, so this loop calls as little as it can."""
        data, at, found = self._data, self._at, []
        for _ in range(count):
            start = at + 8
            at = start + _LENGTH.unpack_from(data, at)[0]
            if at > len(data):
                raise IndexError(f"a string that ends at byte {at}")
            found.append(str(data[start:at], "utf-8", "replace"))
        self._at = at
        return found

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._strings(1)[0]
        if kind != _ARRAY:
            raise ModelError(f"{self.path}: metadata of the unknown type {kind}; the file is corrupt")
        item, count = self._scalar("I"), self._scalar("Q")
        if count > MAX_MERGES:  # a tokenizer's merges are the longest array
            raise ModelError(f"{self.path}: a metadata array of {count} items; the file is corrupt")
        if item == _STRING:
            return self._strings(count)
        if item not in _SCALARS:
            raise ModelError(f"{self.path}: metadata array of the unknown type {item}; the file is corrupt")
        code = f"<{count}{_SCALARS[item]}"
        values = struct.unpack_from(code, self._data, self._at)
        self._at += struct.calcsize(code)
        return list(values)


# general.architecture -> family; Mistral models are stored as `llama` too, and Mixtral models with experts
ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gemma": "gemma", "gemma3": "gemma3",
    "granite": "granite", "mistral3": "ministral3", "smollm3": "smollm3", "seed_oss": "seed_oss",
    "phi3": "phi3", "granitemoe": "granitemoe",
}  # fmt: skip
# Architecture -> metadata of an expert's size
_MIXTURES = {
    "qwen3moe": "expert_feed_forward_length", "granitemoe": "feed_forward_length", "llama": "feed_forward_length",
}  # fmt: skip

_GEMMA_PATTERN = 6  # every sixth layer is global; files do not always say so
_GEMMA_LOCAL_THETA = 10_000.0  # rotary base of sliding layers, if the file has none
_SMOLLM3_PATTERN = 4  # every fourth layer has no rotary embedding; files do not say so
_GEMMA_27B_LAYERS = 62  # the one size whose attention scale is hidden / heads instead of head_dim
_MAGNITUDE, _FACTORS = "rope.scaling.attn_factor", "rope_factors_short.weight"  # of longrope
# Values of keys that change what a model computes; others are not supported
_ONLY = {
    "attention.causal": True, "final_logit_softcapping": 0.0, _MAGNITUDE: 1.0, "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}  # fmt: skip


def parse_gguf_config(file: GGUFFile) -> ModelConfig:
    """The model's shape from metadata and tensor shapes.

    Raises:
        UnsupportedModelError: the architecture, or an option of it, is not one specdec runs.
        ModelError: a field is missing or makes no sense.
    """
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedModelError(
            f"{file.path}: is a part of a model (split.count); join them: llama-gguf-split --merge FIRST_PART NEW_FILE"
        )
    if (kind := file.metadata.get("general.type", "model")) != "model":
        raise UnsupportedModelError(
            f"{file.path}: holds no model but '{kind}' (general.type); give the file of the whole model"
        )
    architecture = str(file.metadata.get("general.architecture", "(none)"))
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture '{architecture}' is not supported; use a model of {known}"
        )
    with well_formed(str(file.path)):
        return _Reader(file, architecture).read()


@dataclass(frozen=True)
class _Reader:
    file: GGUFFile
    architecture: str

    def read(self) -> ModelConfig:
        moe = self.architecture.endswith("moe") or int(self._get("expert_count", 0)) > 0
        if moe and self.architecture not in _MIXTURES:
            raise UnsupportedModelError(
                f"{self.file.path}: experts of architecture '{self.architecture}' are not supported; use a dense model "
                f"or one of {', '.join(_MIXTURES)}"
            )
        if moe and self._get("expert_shared_feed_forward_length", 0):  # dense Granite models have this field too
            raise UnsupportedModelError(f"{self.file.path}: shared experts are not supported; use another model")
        if moe and "blk.0.ffn_gate.0.weight" in self.file.tensors:
            raise UnsupportedModelError(f"{self.file.path}: a tensor per expert is not supported; use a newer file")
        for key, only in _ONLY.items():
            is_read = key == _MAGNITUDE and _FACTORS in self.file.tensors
            if (value := self._get(key, only)) != only and not is_read:
                raise UnsupportedModelError(
                    f"{self.file.path}: '{self.architecture}.{key}' {value} is not supported; use another model"
                )
        if "token_embd.weight" not in self.file.tensors:
            raise ModelError(f"{self.file.path}: tensor token_embd.weight is missing; the file is incomplete")
        gemma = self.architecture in ("gemma", "gemma3")
        hidden = self._int("embedding_length")
        heads = self._int("attention.head_count")
        layers = self._int("block_count", most=MAX_LAYERS)
        head_dim = self._int("attention.key_length", hidden // heads)
        rotated = self._int("rope.dimension_count", head_dim)
        partial = rotated if self.architecture == "phi3" else None
        unequal = partial is None and rotated not in (head_dim, hidden // heads)
        if unequal or self._int("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModelError(f"{self.file.path}: keys, values and rotary part must have equal lengths")
        window, local = self._layers(layers)
        rope = self._rope(partial)
        scale_dim = hidden / heads if self.architecture == "gemma3" and layers == _GEMMA_27B_LAYERS else head_dim
        positions_scale = self._get("attention.temperature_scale")  # queries, beyond the original context
        config = ModelConfig(
            family="mixtral" if moe and self.architecture == "llama" else ARCHITECTURES[self.architecture],
            vocab_size=self.file.tensors["token_embd.weight"].shape[0],
            hidden_size=hidden,
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=self._int("attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=self._int(_MIXTURES.get(self.architecture, "feed_forward_length")),
            max_context=rope.original_context if positions_scale else rope.max_context(self._int("context_length")),
            norm_eps=float(self._get("attention.layer_norm_rms_epsilon", 1e-6)),
            rope=rope,
            attn_scale=self._scale("attention.scale", float(scale_dim) ** -0.5),
            activation="gelu_tanh" if gemma else "silu",
            embed_scale=self._scale("embedding_scale", math.sqrt(hidden) if gemma else 1.0),
            logits_divisor=self._scale("logit_scale", 1.0),
            tie_embeddings="output.weight" not in self.file.tensors,
            qkv_bias="blk.0.attn_q.bias" in self.file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self.file.tensors,
            post_norms=self.architecture == "gemma3",
            sliding_window=window,
            local_layers=local,
            experts=self._int("expert_count", most=MAX_EXPERTS) if moe else 0,
            experts_per_token=self._int("expert_used_count") if moe else 0,
        )
        return config.with_residual_scale(self._scale("residual_scale", 1.0))

    def _get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def _int(self, key: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        value = self._get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:  # given per layer, all equal
            value = value[0]
        if isinstance(value, list):
            raise UnsupportedModelError(f"{self.file.path}: '{key}' differs between layers; use another model")
        return positive_int(f"{self.file.path}: metadata '{self.architecture}.{key}'", value, most)

    def _scale(self, key: str, default: float) -> float:
        """A factor; ``default`` where the file leaves it out or gives 0."""
        return float(self._get(key, 0.0)) or default

    def _layers(self, layers: int) -> tuple[int | None, tuple[bool, ...]]:
        """The window and the local layers."""
        if self.architecture == "smollm3":
            return None, tuple((i + 1) % _SMOLLM3_PATTERN == 0 for i in range(layers))
        window = self._get("attention.sliding_window")
        if not window:
            return None, (False,) * layers
        if self.architecture != "gemma3":
            return int(window), (True,) * layers
        pattern = self._get("attention.sliding_window_pattern", _GEMMA_PATTERN)
        if isinstance(pattern, list):
            if len(pattern) != layers:
                raise ModelError(
                    f"{self.file.path}: metadata 'gemma3.attention.sliding_window_pattern' has {len(pattern)} entries "
                    f"for {layers} layers; the file is corrupt"
                )
            return int(window), tuple(bool(flag) for flag in pattern)
        return int(window), tuple((i + 1) % int(pattern) != 0 for i in range(layers))

    def _rope(self, rotated: int | None) -> RopeConfig:
        gemma = self.architecture == "gemma3"
        theta = float(self._get("rope.freq_base", 1_000_000.0 if gemma else 10_000.0))
        local = float(self._get("rope.freq_base_swa", _GEMMA_LOCAL_THETA)) if gemma else None
        scaling, local_rotates = self._rope_scaling(), self.architecture != "smollm3"
        return RopeConfig(theta, local, scaling, local_rotates=local_rotates, rotated=rotated)

    def _rope_scaling(self) -> tuple[str | float, ...] | None:
        if _FACTORS in self.file.tensors:
            original, context = (
                float(self._int(key)) for key in ("rope.scaling.original_context_length", "context_length")
            )
            factors = self.file.rows(_FACTORS, slice(None)).reshape(-1)
            return longrope_scaling(factors, original, context, self._get(_MAGNITUDE))
        factor = float(self._get("rope.scaling.factor", self._get("rope.scale_linear", 0.0)))
        kind = self._get("rope.scaling.type", "linear")
        if kind == "yarn" and "rope_freqs.weight" not in self.file.tensors:
            turns = (self._get(f"rope.scaling.yarn_beta_{key}", usual) for key, usual in (("fast", 32), ("slow", 1)))
            original = float(self._int("rope.scaling.original_context_length"))
            weight = float(self._get("rope.scaling.yarn_log_multiplier", 0.0))
            magnitude = yarn_magnitude(factor) / yarn_magnitude(factor, weight)
            return ("yarn", factor, original, *map(float, turns), magnitude)
        if kind not in ("linear", "none"):
            raise UnsupportedModelError(f"{self.file.path}: rope scaling '{kind}' is not supported; use another file")
        scaled = kind == "linear" and factor != 0.0
        if "rope_freqs.weight" in self.file.tensors:
            factors = self.file.rows("rope_freqs.weight", slice(None)).reshape(-1)
            return ("factors", *(float(each) * (factor if scaled else 1.0) for each in factors))
        return ("linear", factor) if scaled else None


_TOP = {"embed": "token_embd", "final_norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "router": "ffn_gate_inp",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "attn_post_norm": "post_attention_norm",
    "mlp_post_norm": "post_ffw_norm",
    "qkv": "attn_qkv",
    "gate_up": "ffn_up",
}
_SEED_LAYER = _LAYER | {"mlp_norm": "post_attention_norm"}


def _tensor(values: np.ndarray) -> Tensor:
    """A torch tensor over the same memory."""
    import torch  # not at the top: importing it takes seconds, which reading a vocabulary need not wait for

    return torch.from_numpy(values)


class GGUFSource(TensorSource):
    """Tensors of an open GGUF file, dequantised slice by slice.

    Files of architecture `llama`, and of those converted like it, hold the rows of q and k permuted, for rotary
    embedding of neighbouring pairs; this returns them in half-split order. Gemma's norms already hold their +1 in a
    GGUF file.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.name = file.path.stem
        self.config = parse_gguf_config(file)
        self._layer = _SEED_LAYER if self.config.family == "seed_oss" else _LAYER
        self._order: dict[str, np.ndarray] = {}
        if self.config.family in ("llama", "mixtral", "ministral3", "granite", "granitemoe", "smollm3"):
            dim = self.config.head_dim
            self._order = {
                "q": half_split_order(self.config.n_heads, dim),
                "k": half_split_order(self.config.n_kv_heads, dim),
            }

    def has(self, role: str) -> bool:
        return self._tensor_name(role) in self._file.tensors

    def shape(self, role: str) -> tuple[int, ...]:
        name = self._tensor_name(role)
        if name not in self._file.tensors:
            raise ModelError(f"{self._file.path}: tensor {name} is missing; the file is incomplete, fetch it again")
        shape = self._file.supported(name).shape
        if expert_of(role) is None:
            return shape
        if len(shape) != 3 or shape[0] != self.config.experts:
            raise ModelError(
                f"{self._file.path}: tensor {name} has shape {list(shape)} for {self.config.experts} experts; the file "
                "is damaged, fetch it again"
            )
        return shape[1:]

    def rows(self, role: str, low: int, high: int) -> Tensor:
        return _tensor(self._file.rows(self._tensor_name(role), self._index(role, low, high)))

    def stored_blocks(self, role: str) -> StoredBlocks | None:
        tensor = self._file.tensors.get(self._tensor_name(role))
        kind = None if tensor is None else _BLOCK_KINDS.get(tensor.type)
        return None if kind is None else StoredBlocks(kind)

    def blocks(self, role: str, low: int, high: int) -> Tensor:
        return _tensor(self._file.raw_rows(self._tensor_name(role), self._index(role, low, high)))

    def _index(self, role: str, low: int, high: int) -> np.ndarray | slice:
        order, expert = self._order.get(role.rpartition(".")[2]), expert_of(role)
        if expert is not None:
            first = expert * self.shape(role)[0]
            return slice(first + low, first + high)
        return slice(low, high) if order is None else order[low:high]

    def vector(self, role: str) -> Tensor:
        values = _tensor(self._file.rows(self._tensor_name(role), slice(None))).reshape(-1)
        order = self._order.get(role.removesuffix(".bias").rpartition(".")[2]) if role.endswith(".bias") else None
        values = values if order is None else values[_tensor(order)]
        return values / self.config.logits_divisor if role == "final_norm" else values

    def _tensor_name(self, role: str) -> str:
        role, kind = (role.removesuffix(".bias"), ".bias") if role.endswith(".bias") else (role, ".weight")
        if role in _TOP:
            return _TOP[role] + kind
        layer, part = role.split(".")[1], role.rpartition(".")[2]
        name = self._layer.get(part, part)
        return f"blk.{layer}.{name if expert_of(role) is None else name + '_exps'}{kind}"


def half_split_order(heads: int, head_dim: int) -> np.ndarray:
    """The row in the file of each row of a half-split q or k, int64 [heads * head_dim].

    Row j of a head's first half is stored at 2j, of its second half at 2j + 1.
    """
    half = head_dim // 2
    within = np.concatenate([np.arange(half) * 2, np.arange(half) * 2 + 1])
    return (np.arange(heads)[:, None] * head_dim + within[None]).reshape(-1)
