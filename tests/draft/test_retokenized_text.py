"""A text retokenized token by token is the same text, in the draft's own spelling."""

from __future__ import annotations

import difflib
import functools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft.retokenize import RetokenizedText, VocabularyBridge
from specdec.config import EngineConfig
from specdec.models.fim import TEMPLATES, FimTemplate
from specdec.models.resolve import load_tokenizer
from specdec.models.tokenizer import Tokenizer, TokenizerInfo
from tests.draft.tiny_drafts import cut, make_tiny, wordy_tokenizer

Pair = tuple[Tokenizer, Tokenizer, VocabularyBridge]

texts = st.lists(
    st.one_of(
        st.sampled_from([" the", " lazy", "jump", "jumped", " it", "read", "return first + second\n", "    ", "\n\n"]),
        st.text(max_size=4),
        st.sampled_from(["世界", "é", "e\u0301", "👩‍👩‍👧", "ï", "\t", " ", "'s", "123", "(((", "—"]),
    ),
    max_size=60,
).map("".join)


def paired(target: Tokenizer, draft: Tokenizer) -> Pair:
    return target, draft, VocabularyBridge(target, draft, target.vocab_size, draft.vocab_size)


@functools.cache
def tiny_pair(backwards: bool = False) -> Pair:
    pair = make_tiny("target"), make_tiny("other")
    return paired(*pair[::-1]) if backwards else paired(*pair)


def text_of(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(token) for token in ids)


def tell(pair: Pair, ids: list[int], rng: random.Random, first: int = 1) -> RetokenizedText:
    """Add ``ids`` a few at a time, checking the invariants at each step."""
    retokenized = RetokenizedText(*pair, ids[:first])
    at = first
    while at < len(ids):
        step = rng.choice((0, 1, 1, 2, 3, 9))
        before, settled = list(retokenized.ids), retokenized.stable
        kept = retokenized.extend(ids[at : at + step])
        at += step
        assert retokenized.ids[:kept] == before[:kept], "ids said to have stayed have changed"
        assert kept >= settled, "settled ids were not kept"
        assert kept <= len(retokenized.ids)
        assert settled <= retokenized.stable <= len(retokenized.ids)
    return retokenized


@settings(max_examples=150)
@given(text=texts, seed=st.integers(0, 2**32), backwards=st.booleans())
def test_the_text_is_the_same(text: str, seed: int, backwards: bool) -> None:
    rng, pair = random.Random(seed), tiny_pair(backwards)
    ids = cut(pair[0], text, rng)
    retokenized = tell(pair, ids, rng, rng.randint(0, len(ids)))
    assert retokenized.whole
    assert text_of(pair[1], retokenized.ids) == text.encode()


@settings(max_examples=60)
@given(text=texts, seed=st.integers(0, 2**32))
def test_a_partial_character_is_held_back(text: str, seed: int) -> None:
    """After every single token the text ends with the last whole character, and ``whole`` marks the rest."""
    rng, pair = random.Random(seed), tiny_pair()
    ids = cut(pair[0], text, rng)
    retokenized = RetokenizedText(*pair, [])
    for at, token in enumerate(ids):
        retokenized.extend([token])
        observed = text_of(pair[0], ids[: at + 1])
        read = text_of(pair[1], retokenized.ids)
        assert observed.startswith(read)
        assert retokenized.whole == (read == observed)
        assert len(observed) - len(read) < 4


@settings(max_examples=60)
@given(data=st.binary(max_size=60), text=texts, seed=st.integers(0, 2**32))
def test_invalid_bytes_are_replaced(data: bytes, text: str, seed: int) -> None:
    rng, pair = random.Random(seed), tiny_pair()
    target, draft, _ = pair
    by_bytes = {target.token_bytes(t): t for t in range(target.vocab_size) if t not in target.special_ids}
    ids = [by_bytes[bytes([byte])] for byte in data] + cut(target, text, rng)
    retokenized = tell(pair, ids, rng, rng.randint(0, len(ids)))
    whole = text_of(target, ids).decode(errors="replace")
    read = text_of(draft, retokenized.ids).decode()
    assert read == whole if retokenized.whole else whole.startswith(read)


@settings(max_examples=60)
@given(pieces=st.lists(texts, min_size=1, max_size=5), seed=st.integers(0, 2**32))
def test_special_tokens_keep_their_meaning(pieces: list[str], seed: int) -> None:
    """Special tokens that the draft has by name are kept, others omitted; the text between them is unchanged."""
    rng, pair = random.Random(seed), tiny_pair()
    target, draft, bridge = pair
    specials = sorted(target.special_ids)
    ids, expected = cut(target, pieces[0], rng), pieces[0].encode()
    for piece in pieces[1:]:
        token = rng.choice(specials)
        ids += [token, *cut(target, piece, rng)]
        twin = bridge.to_draft[token]
        expected += (draft.token_bytes(twin) if twin >= 0 else b"") + piece.encode()
    retokenized = tell(pair, ids, rng, rng.randint(0, len(ids)))
    assert text_of(draft, retokenized.ids) == expected
    assert retokenized.whole


def test_a_special_token_ends_a_partial_character() -> None:
    target, draft, _ = pair = tiny_pair()
    half = target.encode("世", add_special=False)[0]
    start = target.token_id("<|im_start|>")
    assert start is not None
    retokenized = RetokenizedText(*pair, [half])
    assert not retokenized.whole
    retokenized.extend([start])
    assert retokenized.whole
    retokenized.extend(target.encode("x", add_special=False))
    assert draft.decode(retokenized.ids, skip_special=False) == "\ufffd<|im_start|>x"


def test_a_word_in_two_tokens_is_retokenized() -> None:
    pair = paired(wordy_tokenizer(("jump", "ed")), wordy_tokenizer(("jumped", "ju")))
    target, draft, _ = pair
    first, second = target.encode("jumped", add_special=False)
    retokenized = RetokenizedText(*pair, [first])
    before = list(retokenized.ids)
    assert text_of(draft, before) == b"jump"
    assert retokenized.extend([second]) == 0
    assert retokenized.ids == draft.encode("jumped", add_special=False)
    assert len(retokenized.ids) == 1


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), backwards=st.booleans())
def test_notified_words_equal_those_observed_directly(seed: int, backwards: bool) -> None:
    rng, pair = random.Random(seed), tiny_pair(backwards)
    known = ["the", "lazy", "jumped", "read", "reader", "first", "event", "other", "course", "becomes", "12", "(", "="]
    text = "".join(rng.choice((" ", "", "\n", "    ")) + rng.choice(known) for _ in range(rng.randint(1, 90)))
    ids = cut(pair[0], text, rng)
    assert tell(pair, ids, rng).ids == pair[1].encode(text, add_special=False)


def test_a_long_text_is_stable() -> None:
    """Otherwise every token would cost as much as the whole text."""
    target, _, _ = pair = tiny_pair()
    retokenized = RetokenizedText(*pair, [])
    for token in target.encode("the quick brown fox 世界 jumps over it " * 20, add_special=False):
        retokenized.extend([token])
        assert len(retokenized.ids) - retokenized.stable <= 40


def begun(tokenizer_words: tuple[str, ...], begin: str) -> Tokenizer:
    """A tokenizer whose prompts start with special token ``begin``."""
    plain = wordy_tokenizer(tokenizer_words, (begin, "<|x|>"))
    return Tokenizer(plain._backend.to_str(), TokenizerInfo(bos_id=plain.token_id(begin), add_bos=True))


@pytest.mark.parametrize(("ours", "theirs"), [("<s>", "<s>"), ("<s>", "<bos>")])
def test_the_drafts_begin_token_is_added_once(ours: str, theirs: str) -> None:
    target, draft = begun(("the",), ours), begun(("dog",), theirs)
    retokenized = RetokenizedText(*paired(target, draft), target.encode("the dog"))
    assert retokenized.ids == draft.encode("the dog")
    assert retokenized.ids[0] == draft.bos_id


@pytest.mark.parametrize("template", [template for template in TEMPLATES if template.middle], ids=lambda t: t.name)
@pytest.mark.parametrize("order", ["psm", "spm", "spm, as code llama", "broken"])
@pytest.mark.parametrize("output", ["", "MIDDLE"])
def test_fill_in_the_middle_is_read_as_a_document(template: FimTemplate, order: str, output: str) -> None:
    prefix, suffix, middle = template.prefix[-1], template.suffix[-1], template.middle[-1]
    target = wordy_tokenizer(("the", "def"), (prefix, suffix, middle, "<|repo|>"))
    draft = wordy_tokenizer(("he", "ef"), ("<|repo|>",))
    prompts = {
        "psm": f"<|repo|>f.py {prefix}def a{suffix} the end {middle}{output}",
        "spm": f"<|repo|>f.py {suffix} the end {prefix}def a{middle}{output}",
        "spm, as code llama": f"<|repo|>f.py {prefix}{suffix} the end {middle}def a{output}",
        "broken": f"<|repo|>f.py {middle}def a{prefix}{output}",
    }
    ids = target.encode(prompts[order], add_special=False, parse_special=True)
    read = draft.decode(RetokenizedText(*paired(target, draft), ids).ids, skip_special=False)
    assert read == f"<|repo|>f.py {'' if order == 'broken' else ' the end '}def a{output}"


@pytest.mark.parametrize("output", ["", "MIDDLE"])
def test_a_template_without_a_middle_token_is_read_as_a_document(output: str) -> None:
    (template,) = (template for template in TEMPLATES if not template.middle)
    (prefix,), (suffix,) = template.prefix, template.suffix
    target, draft = wordy_tokenizer(("the", "def"), (prefix, suffix)), wordy_tokenizer(("he", "ef"), ())
    ids = target.encode(f"f.py {suffix} the end {prefix}def a{output}", add_special=False, parse_special=True)
    assert draft.decode(RetokenizedText(*paired(target, draft), ids).ids) == f"f.py  the end def a{output}"


@functools.cache
def real_pair(backwards: bool) -> Pair:
    cache_dir = EngineConfig().cache_dir.expanduser()
    found = load_tokenizer("qwen2.5-coder-1.5b", cache_dir), load_tokenizer("smollm2-135m", cache_dir)
    return paired(*found[::-1]) if backwards else paired(*found)


def real_text(seed: int) -> str:
    rng = random.Random(seed)
    source = Path(__file__).read_text() if seed % 2 else Path(random.__file__).read_text()
    at = rng.randrange(len(source) - 1500)
    return source[at : at + 1500] + "你好, 世界 — naïve 👩‍👩‍👧 1234567 " + "".join(rng.choices("ab \n\t(.=é世", k=150))


@pytest.mark.model
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_real_vocabularies(seed: int, backwards: bool) -> None:
    rng, pair = random.Random(seed), real_pair(backwards)
    text = real_text(seed)
    ids = pair[0].encode(text, add_special=False)
    if seed > 1:  # also words split where no tokenizer would
        ids = [t for i in range(0, len(text), 5) for t in pair[0].encode(text[i : i + 5], add_special=False)]
    retokenized = tell(pair, ids, rng)
    assert text_of(pair[1], retokenized.ids).decode() == text
    whole = pair[1].encode(text, add_special=False)
    blocks = difflib.SequenceMatcher(None, retokenized.ids, whole, autojunk=False).get_matching_blocks()
    assert sum(block.size for block in blocks) >= 0.99 * len(whole)


@settings(max_examples=60)
@given(text=texts, more=texts, reads=st.integers(1, 12))
def test_a_long_prompt_is_truncated_to_its_end(text: str, more: str, reads: int) -> None:
    pair = tiny_pair()
    ids = pair[0].encode(text * 3)
    whole, short = RetokenizedText(*pair, ids), RetokenizedText(*pair, ids, reads)
    assert short.ids == whole.ids[len(whole.ids) - len(short.ids) :]
    assert short.stable - whole.stable == len(short.ids) - len(whole.ids)
    assert min(reads, whole.stable) <= short.stable < 2 * reads or short.ids == whole.ids
    for token in pair[0].encode(more):
        kept = short.extend([token])
        assert kept - whole.extend([token]) == len(short.ids) - len(whole.ids)
    assert short.ids == whole.ids[len(whole.ids) - len(short.ids) :]


def test_the_next_keystroke_keeps_the_truncation_point() -> None:
    pair = tiny_pair()
    ids = pair[0].encode(" the lazy dog jumped" * 60)
    starts = [
        len(RetokenizedText(*pair, ids[:n]).ids) - len(RetokenizedText(*pair, ids[:n], 16).ids) for n in range(80, 160)
    ]
    assert len(set(starts)) < len(starts) / 5
    assert all(start % 16 == 0 for start in starts)
