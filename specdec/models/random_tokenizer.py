"""A tokenizer for models that never saw text: bytes in, and out comes the name of each token."""

from __future__ import annotations

import json

from specdec.models.token_bytes import byte_level_alphabet
from specdec.models.tokenizer import Tokenizer
from specdec.models.tokenizer_info import TokenizerInfo

CONTROL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
)  # fmt: skip
_BYTES = 256
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
    what the model makes of one reads " 1f3a", a blank and the id in hexadecimal, which nobody takes for language.
    """
    control = control_token_ids(vocab_size)
    if control.start < _BYTES:
        raise ValueError(f"vocab_size: {vocab_size} has no room for {_BYTES} bytes and {len(control)} control tokens")
    space = next(char for char, byte in byte_level_alphabet().items() if byte == ord(" "))
    vocabulary = dict(byte_level_alphabet())
    vocabulary.update((f"{space}{token:x}", token) for token in range(_BYTES, control.start))
    names = dict(zip(CONTROL_TOKENS, control, strict=True))
    data = {
        "version": "1.0",
        "added_tokens": [_added(name, token) for name, token in names.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    ends = (names["<|im_end|>"], names["<|endoftext|>"])
    return Tokenizer(json.dumps(data), TokenizerInfo(eos_ids=ends, chat_template=_CHAT_TEMPLATE))


def _added(name: str, token: int) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token, "content": name, **flags}
