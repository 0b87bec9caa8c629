"""The default model: its vocabulary, template and weights, against the gguf library and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from specdec.config import EngineConfig
from specdec.models.catalogue import DEFAULT_MODEL, find_entry
from specdec.models.fetch import Fetcher
from specdec.models.load import LoadedModel, load_model
from tests.models.tiny_gguf import interleave
from verify_kernels.packed_weights import pack_linear

pytestmark = pytest.mark.model

TEXTS = [
    "def f(x1234):\n\treturn 'héllo 世界' # ok\n\n\n",
    "It's 42 degrees; we'LL see 🎉👩‍👩‍👧 \u0301e נמסטה नमस्ते",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><file_sep>",
    "trailing   ",
    "   leading",
    "\r\n\r\nx\n \n",
    "",
    "a" * 300,
    " ".join(str(i) for i in range(60)),
]


@pytest.fixture(scope="module")
def cache_dir() -> Path:
    """The user's own cache, so that the model is fetched once per machine."""
    return EngineConfig().cache_dir.expanduser()


@pytest.fixture(scope="module")
def smollm2(cache_dir: Path) -> LoadedModel:
    """The default model in int8."""
    return load_model(DEFAULT_MODEL, dtype="int8", cache_dir=cache_dir)


@pytest.fixture(scope="module")
def path(smollm2: LoadedModel, cache_dir: Path) -> Path:
    """Its GGUF file."""
    return Fetcher(cache_dir / "models").path(find_entry(DEFAULT_MODEL))


@pytest.fixture(scope="module")
def oracle(path: Path) -> Any:
    """transformers' tokenizer of the file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_settings(smollm2: LoadedModel) -> None:
    config, tokenizer = smollm2.config, smollm2.tokenizer
    assert (smollm2.name, config.family, config.n_layers, config.hidden_size) == (DEFAULT_MODEL, "llama", 30, 576)
    assert (config.n_heads, config.n_kv_heads, config.head_dim, config.max_context) == (9, 3, 64, 8192)
    assert config.tie_embeddings
    assert tokenizer.eos_ids[0] == tokenizer.token_id("<|im_end|>") == 2
    assert not tokenizer.add_bos


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_tokens_agree_with_transformers(text: str, smollm2: LoadedModel, oracle: Any) -> None:
    tokenizer = smollm2.tokenizer
    ids = tokenizer.encode(text, parse_special=True)
    assert ids == oracle.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special=False) == text
    plain = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, plain)) == text.encode()
    assert not tokenizer.special_ids.intersection(plain)


def test_digits_are_split_before_spaces_merge(smollm2: LoadedModel) -> None:
    # transformers' conversion of this file misses the digit splitting its `pre` entry calls for
    tokenizer = smollm2.tokenizer
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("a  12")] == [b"a", b"  ", b"1", b"2"]


def test_instruct_template(smollm2: LoadedModel, oracle: Any) -> None:
    messages = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "4"}]
    messages.append({"role": "user", "content": "Sure?"})
    rendered = smollm2.tokenizer.render_chat(messages)
    assert rendered == oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert rendered.endswith("<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n")
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert smollm2.tokenizer.encode_chat(messages) == expected


def test_weights_equal_the_files(smollm2: LoadedModel, path: Path) -> None:
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}

    def stored(name: str) -> torch.Tensor:
        values = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
        return torch.from_numpy(np.array(values, dtype=np.float32))

    embed = stored("token_embd.weight")
    assert torch.equal(smollm2.weights.embed, embed.half())
    expected = pack_linear(embed, None, "int8")
    assert torch.equal(smollm2.weights.lm_head.data, expected.data)
    layer = smollm2.weights.layers[17]
    q, k = (_half_split(stored(f"blk.17.attn_{x}.weight"), heads) for x, heads in (("q", 9), ("k", 3)))
    qkv = pack_linear(torch.cat([q, k, stored("blk.17.attn_v.weight")]), None, "int8")
    assert torch.equal(layer.qkv.data, qkv.data)
    assert layer.qkv.scale is not None
    assert qkv.scale is not None
    assert torch.equal(layer.qkv.scale, qkv.scale)
    assert torch.equal(layer.mlp_norm, stored("blk.17.ffn_norm.weight"))


def _half_split(weight: torch.Tensor, heads: int) -> torch.Tensor:
    split = weight.reshape(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    assert torch.equal(interleave(split, heads), weight)
    return split
