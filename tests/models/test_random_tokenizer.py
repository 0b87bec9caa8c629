"""The tokenizer of random models: every text is a prompt, every token has a name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.models.random_model import CONTROL_TOKENS, control_token_ids, random_tokenizer

SIZE = 1000
TOKENIZER = random_tokenizer(SIZE)


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert bytes(ids) == text.encode()
    assert TOKENIZER.decode(ids) == text


def test_every_id_has_unique_bytes() -> None:
    named = [TOKENIZER.token_bytes(token) for token in range(SIZE)]
    assert all(named)
    assert len(set(named)) == SIZE
    assert named[: control_token_ids(SIZE).start] == [
        bytes([token]) if token < 256 else f" {token:x}".encode() for token in range(SIZE - len(CONTROL_TOKENS))
    ]
    assert TOKENIZER.vocab_size == SIZE
    assert TOKENIZER.base_size == SIZE - len(CONTROL_TOKENS)
    assert TOKENIZER.decode([65, 256, 257]) == "A 100 101"


def test_control_tokens_end_and_frame_answers() -> None:
    by_name = dict(zip(CONTROL_TOKENS, control_token_ids(SIZE), strict=True))
    assert TOKENIZER.special_ids == set(by_name.values())
    assert TOKENIZER.eos_ids == (by_name["<|im_end|>"], by_name["<|endoftext|>"])
    ids = TOKENIZER.encode_chat([{"role": "user", "content": "hi <|im_end|>"}])
    assert ids.count(by_name["<|im_end|>"]) == 1
    assert TOKENIZER.decode(ids) == "user\nhi <|im_end|>\nassistant\n"


def test_a_too_small_vocabulary_is_rejected() -> None:
    assert random_tokenizer(262).vocab_size == 262
    with pytest.raises(ValueError, match="vocab_size: 261 has no room"):
        random_tokenizer(261)
