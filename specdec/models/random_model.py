"""A model of a given shape with random weights: for benchmarks of speed, without any download."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor

from specdec.errors import ModelError
from specdec.models.catalogue import RANDOM_PREFIX
from specdec.models.checkpoint import Checkpoint, TensorSource
from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.tokenizer import Tokenizer, TokenizerInfo, byte_level_alphabet
from specdec.models.weights import tensor_shapes

_LLAMA = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    max_context=131072,
    norm_eps=1e-5,
    rope=RopeConfig(500_000.0, None, ("llama3", 8.0, 1.0, 4.0, 8192.0)),
    attn_scale=128**-0.5,
)
_QWEN = ModelConfig(
    family="qwen2",
    vocab_size=152064,
    hidden_size=3584,
    n_layers=28,
    n_heads=28,
    n_kv_heads=4,
    head_dim=128,
    intermediate_size=18944,
    max_context=32768,
    norm_eps=1e-6,
    rope=RopeConfig(1_000_000.0),
    attn_scale=128**-0.5,
    qkv_bias=True,
)

# As the models' own config.json files have them; tiny is for tests.
RANDOM_SHAPES: dict[str, ModelConfig] = {
    "llama-3.1-8b": _LLAMA,
    "qwen2.5-coder-1.5b": replace(
        _QWEN,
        vocab_size=151936,
        hidden_size=1536,
        n_heads=12,
        n_kv_heads=2,
        intermediate_size=8960,
        tie_embeddings=True,
    ),
    "qwen2.5-coder-0.5b": replace(
        _QWEN,
        vocab_size=151936,
        hidden_size=896,
        n_layers=24,
        n_heads=14,
        n_kv_heads=2,
        head_dim=64,
        intermediate_size=4864,
        attn_scale=64**-0.5,
        tie_embeddings=True,
    ),
    "qwen2.5-coder-7b": _QWEN,
    "qwen2.5-coder-32b": replace(
        _QWEN, hidden_size=5120, n_layers=64, n_heads=40, n_kv_heads=8, intermediate_size=27648
    ),
    "tiny": replace(
        _QWEN,
        vocab_size=384,
        hidden_size=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=64,  # the least that a GPU's kernels know
        intermediate_size=160,
        max_context=2048,
        attn_scale=64**-0.5,
    ),
}


CONTROL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
)  # fmt: skip
_BYTES = 256  # values of a byte
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def control_token_ids(vocab_size: int) -> range:
    """Where `CONTROL_TOKENS` lie: at the end of the vocabulary."""
    return range(vocab_size - len(CONTROL_TOKENS), vocab_size)


def random_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly ``vocab_size`` tokens (262 or more).

    Token b < 256 is the byte b, so that any text can be a prompt, one token per byte. No text becomes a later token;
    what the model makes of one reads " 1f3a", a blank and the id in hexadecimal, which is unlike any language.
    """
    control = control_token_ids(vocab_size)
    if control.start < _BYTES:
        raise ValueError(f"vocab_size: {vocab_size} has no room for {_BYTES} bytes and {len(control)} control tokens")
    space = next(char for char, byte in byte_level_alphabet().items() if byte == ord(" "))
    vocabulary = dict(byte_level_alphabet())
    vocabulary.update((f"{space}{token:x}", token) for token in range(_BYTES, control.start))
    made = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, normalized=False) for name in CONTROL_TOKENS])
    ends = tuple(control[CONTROL_TOKENS.index(name)] for name in ("<|im_end|>", "<|endoftext|>"))
    return Tokenizer(made.to_str(), TokenizerInfo(eos_ids=ends, chat_template=_CHAT_TEMPLATE))


LOGIT_STD = 3.0  # of logits: the likeliest of 128k tokens has about a fifth of the probability, as in undecided text
_SCORE_STD = 2.0  # of q.k: a row attends to dozens of a thousand keys, neither to one nor to all
_GATED_RMS = 0.6  # of silu(g) u, with g and u standard normal
_QUIET = 1 / 16  # factor of control tokens' output rows, so that a random model does not end its answers
_NORM_SPREAD = 0.1  # standard deviation of a norm's weights around 1
_BIAS_STD = 0.1  # standard deviation of biases
_WORD = (1 << 64) - 1  # largest word of the generator
_BYTE_STD = 256 / math.sqrt(12)  # standard deviation of a uniform byte


class RandomSource(TensorSource):
    """A source whose every value is a function of (seed, role, row, column) alone, uniformly distributed.

    Spreads are such that activations stay near 1 through all layers and logits are as `LOGIT_STD` says.
    """

    def __init__(self, name: str, config: ModelConfig, seed: int) -> None:
        self.name = name
        self.config = config
        self._seed = seed
        self._shapes = tensor_shapes(config, lambda role: config.qkv_bias and role.endswith((".q", ".k", ".v")))

    def has(self, role: str) -> bool:
        return role in self._shapes

    def shape(self, role: str) -> tuple[int, ...]:
        if role not in self._shapes:
            raise ModelError(f"{self.name}: a model of this shape has no tensor {role}")
        return self._shapes[role]

    def rows(self, role: str, low: int, high: int) -> Tensor:
        """Rows [low, high) of matrix ``role``, float32; takes about a nanosecond per value."""
        n_rows, columns = self.shape(role)
        low, high = min(low, n_rows), min(high, n_rows)
        values = self._uniform(role, low, high, columns) * self._std(role)
        if role == ("embed" if self.config.tie_embeddings else "lm_head"):
            quiet = [token - low for token in control_token_ids(n_rows) if low <= token < high]
            values[quiet] *= _QUIET
        return values

    def vector(self, role: str) -> Tensor:
        """Vector ``role``, float32: a bias near 0, a norm's weights near 1.

        The last norm's weights have either sign: otherwise, with tied embeddings, a token would most likely be
        followed by itself.
        """
        (size,) = self.shape(role)
        values = self._uniform(role, 0, 1, size)[0]
        if role.endswith(".bias"):
            return values * _BIAS_STD
        weights = 1.0 + values * _NORM_SPREAD
        return weights * values.sign() if role == "final_norm" else weights

    def _uniform(self, role: str, low: int, high: int, columns: int) -> Tensor:
        """Rows of variance 1 and mean 0, one random byte per value.

        A row begins on a whole word of the generator, so that reading can start at any row.
        """
        words = -(-columns // 8)
        digest = hashlib.sha256(f"{self._seed}|{role}".encode()).digest()
        bits = np.random.PCG64(int.from_bytes(digest[:16], "little")).advance(low * words)
        # whole words, not bytes: the only draw that takes one step of the generator per word, and frees other threads
        raw = np.random.Generator(bits).integers(0, _WORD, (high - low) * words, dtype=np.uint64, endpoint=True)
        values = raw.astype("<u8", copy=False).view(np.int8).reshape(high - low, 8 * words)[:, :columns]
        return torch.from_numpy(values).float().add_(0.5).div_(_BYTE_STD)

    def _std(self, role: str) -> float:
        config = self.config
        branch = 1 / math.sqrt(2 * config.n_layers)  # all layers' shares of the residual stream add up to about 1
        part = role.rpartition(".")[2]
        if part == "embed":
            return LOGIT_STD / math.sqrt(config.hidden_size) if config.tie_embeddings else 1.0
        if part == "lm_head":
            return LOGIT_STD / math.sqrt(config.hidden_size)
        if part in ("q", "k"):
            return math.sqrt(_SCORE_STD / config.hidden_size)
        if part == "o":
            return branch / math.sqrt(config.q_size)
        if part == "down":
            return branch / (_GATED_RMS * math.sqrt(config.intermediate_size))
        return 1 / math.sqrt(config.hidden_size)  # v, gate, up


_RECIPE, _SEED = 1, 0  # raise the first when other values come out of the same seed


class RandomCheckpoint(Checkpoint):
    """The `Checkpoint` that "random:SHAPE" names.

    Raises:
        ModelError: no such shape.
    """

    keeps_packed = False  # made as fast as read from a disk, and as large

    def __init__(self, name: str) -> None:
        shape = name.removeprefix(RANDOM_PREFIX)
        if shape not in RANDOM_SHAPES:
            known = ", ".join(RANDOM_PREFIX + known for known in RANDOM_SHAPES)
            raise ModelError(f"{name}: no such shape; there are {known}")
        self.name = RANDOM_PREFIX + shape
        self.path = self.place = Path(self.name)
        self._config = RANDOM_SHAPES[shape]

    def fingerprint(self) -> str:
        """Over the shape and the recipe."""
        return hashlib.sha256(f"random {_RECIPE} {_SEED} {self._config}".encode()).hexdigest()

    def open(self) -> RandomSource:
        return RandomSource(self.name, self._config, _SEED)

    def tokenizer(self, cache_dir: Path) -> Tokenizer:
        """Made for the shape's vocabulary."""
        return random_tokenizer(self._config.vocab_size)
