"""Twins of two vocabularies, and logits taken from one to the other."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft.retokenize import MASKED_LOGIT, VocabularyBridge
from specdec.models.tokenizer import Tokenizer
from tests.draft.tiny_drafts import make_tiny, wordy_tokenizer
from tests.grammar.helpers import sentence_piece
from tests.models.test_gguf_tokenizer import SENTENCEPIECE


@functools.cache
def pair() -> tuple[Tokenizer, Tokenizer]:
    """Two byte-level vocabularies that share bytes, some words and some special tokens."""
    return make_tiny("target"), make_tiny("other")


@functools.cache
def bridge(spare: int = 9) -> VocabularyBridge:
    target, draft = pair()
    return VocabularyBridge(target, draft, target.vocab_size + spare, draft.vocab_size + spare)


def test_twins_have_the_same_text() -> None:
    target, draft = pair()
    found = 0
    for token, twin in enumerate(bridge().to_draft):
        if twin >= 0:
            found += 1
            assert target.token_bytes(token) == draft.token_bytes(twin)
            assert (token in target.special_ids) == (twin in draft.special_ids)
    assert found > 256


def test_the_maps_are_inverse() -> None:
    both = bridge()
    for token, twin in enumerate(both.to_draft):
        assert twin < 0 or both.to_target[twin] == token
    for twin, token in enumerate(both.to_target):
        assert token < 0 or both.to_draft[token] == twin


def test_every_token_with_a_twin_is_mapped() -> None:
    target, draft = pair()
    theirs = {(i in draft.special_ids, draft.token_bytes(i)) for i in range(draft.vocab_size)}
    for token in range(target.vocab_size):
        has = (token in target.special_ids, target.token_bytes(token)) in theirs
        assert has == (bridge().to_draft[token] >= 0)


def test_special_tokens_match_by_name() -> None:
    target, draft = pair()
    start, end = target.token_id("<|im_start|>"), target.token_id("<|im_end|>")
    assert start is not None
    assert end is not None
    assert bridge().to_draft[start] == draft.token_id("<|im_start|>")
    assert bridge().to_draft[end] == -1  # the draft has none of that name


def test_the_text_of_a_special_name_is_not_the_special_token() -> None:
    text, special = wordy_tokenizer(("<a>",), ()), wordy_tokenizer((), ("<a>",))
    both = VocabularyBridge(text, special, text.vocab_size, special.vocab_size)
    assert both.to_target[special.token_id("<a>") or -1] == -1


@pytest.mark.parametrize("as_target", [True, False])
def test_characters_are_twins_before_byte_tokens(as_target: bool) -> None:
    """SentencePiece has a token of `a`, and one of its byte for vocabularies that lack it, which no text is split
    into."""
    piece, level = SENTENCEPIECE, pair()[1]
    target, draft = (piece, level) if as_target else (level, piece)
    both = VocabularyBridge(target, draft, target.vocab_size, draft.vocab_size)
    for text in ("a", "c", " "):
        (ours,), (theirs,) = (tokenizer.encode(text, add_special=False) for tokenizer in (target, draft))
        assert (both.to_draft[ours], both.to_target[theirs]) == (theirs, ours)
    byte = piece.encode("世", add_special=False)[0]
    assert (both.to_draft if as_target else both.to_target)[byte] == level.encode("世", add_special=False)[0]


def test_padding_has_no_twin() -> None:
    target, draft = pair()
    assert set(bridge().to_draft[target.vocab_size :]) == {-1}
    assert set(bridge().to_target[draft.vocab_size :]) == {-1}


def test_a_table_smaller_than_the_vocabulary_is_respected() -> None:
    target, draft = pair()
    both = VocabularyBridge(target, draft, 100, 90)
    assert (len(both.to_draft), len(both.to_target)) == (100, 90)
    assert max(both.to_draft) < 90
    assert max(both.to_target) < 100
    word = draft.encode(" jumped", add_special=False)[0]
    assert all(token < 100 for token in both.spelled(word))


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 4))
def test_translate_equals_a_loop(seed: int, rows: int) -> None:
    both = bridge()
    logits = torch.randn(rows, len(both.to_target), generator=torch.Generator().manual_seed(seed))
    out = both.buffer(5)
    both.translate(torch.randn(5, len(both.to_target)), out)  # left by another batch
    found = both.translate(logits, out)
    assert found.shape == (rows, len(both.to_draft))
    for row in range(rows):
        expected = [logits[row, twin].item() if twin >= 0 else MASKED_LOGIT for twin in both.to_draft]
        assert torch.equal(found[row], torch.tensor(expected))


def test_a_word_is_tokenized_for_the_target() -> None:
    target, draft = pair()
    strange = [t for t in range(draft.vocab_size) if bridge().to_target[t] < 0 and t not in draft.special_ids]
    spelled = 0
    for token in strange:
        parts = bridge().spelled(token)
        data = draft.token_bytes(token)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            assert parts == ()
            continue
        spelled += 1
        assert list(parts) == target.encode(text, add_special=False)
        assert b"".join(map(target.token_bytes, parts)) == data
    assert spelled > 10


def test_invalid_text_is_not_tokenized() -> None:
    _, draft = pair()
    half = draft.encode("世", add_special=False)[0]
    assert draft.token_bytes(half) != "世".encode()
    assert bridge().spelled(half) == ()
    assert bridge().spelled(draft.token_id("<|im_start|>") or -1) == ()
    assert bridge().spelled(draft.vocab_size + 3) == ()


@pytest.mark.parametrize("target", [make_tiny("spaced"), sentence_piece()], ids=["bytes", "pieces"])
def test_a_target_that_adds_spaces_tokenizes_parts_of_words(target: Tokenizer) -> None:
    draft = wordy_tokenizer((" done", "done"))
    both = VocabularyBridge(target, draft, target.vocab_size, draft.vocab_size)
    for text in ("done", " done"):
        (token,) = draft.encode(text, add_special=False)
        assert b"".join(map(target.token_bytes, both.spelled(token))) == text.encode()


class OnDevice(torch.Tensor):
    """Logits in a GPU's memory, which numpy cannot read."""

    def numpy(self, *, force: bool = False) -> np.ndarray:
        raise TypeError("can't convert a tensor of a device to numpy")

    def cpu(self, *_: object, **__: object) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_bug_logits_of_a_gpu_are_translated() -> None:
    both = bridge()
    logits = torch.randn(2, len(both.to_target))
    found = both.translate(logits.as_subclass(OnDevice), both.buffer(2)).clone()
    assert torch.equal(found, both.translate(logits, both.buffer(2)))
