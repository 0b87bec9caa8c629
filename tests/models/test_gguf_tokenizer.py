"""Tokenizers built from GGUF vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.fim import FimTokens
from specdec.models.gguf_tokenizer import convert_gguf_tokenizer
from specdec.models.load import load_model
from specdec.models.tokenizer import Tokenizer
from tests.models.tiny_gguf import write_tiny_gguf

Tiny = Callable[[str], Path]

PIECES = {
    "▁": -9.0, "a": -9.1, "b": -9.2, "c": -9.3, "▁a": -3.0, "ab": -2.0, "bc": -1.0, "abc": -4.0, "▁ab": -2.5,
    "ca": -5.0, "cab": -0.5, "aa": -6.0, "bcab": -0.7, "▁▁": -3.5, "é": -9.4,
}  # fmt: skip


def _convert(architecture: str = "llama", **metadata: Any) -> Tokenizer:
    keys = {"general.architecture": architecture}
    keys |= {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    return Tokenizer(*convert_gguf_tokenizer(SimpleNamespace(path=Path("m.gguf"), metadata=keys)))  # type: ignore[arg-type]


def _sentencepiece(
    pieces: dict[str, float] | None = None, user_defined: tuple[str, ...] = (), **metadata: Any
) -> Tokenizer:
    pieces = pieces or PIECES
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *user_defined]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), *[4] * len(user_defined)]
    scores = [0.0] * 259 + list(pieces.values()) + [0.0] * len(user_defined)
    given = {"bos_token_id": 1, "eos_token_id": 2} | metadata
    return _convert(model="llama", tokens=tokens, token_type=types, scores=scores, **given)


def _join_best(text: str, score: dict[str, float]) -> list[str]:
    """SentencePiece's rule, naively: join the best scoring neighbours, leftmost first, while any pair is a piece."""
    symbols = list(text)
    while True:
        joins = [(score[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in score]
        if not joins:
            return symbols
        at = -max(joins)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@given(text=st.text(alphabet="abc ", max_size=24))
def test_scores_merge_like_sentencepiece(text: str) -> None:
    tokenizer = SENTENCEPIECE
    names = {token_id: token for token, token_id in tokenizer.vocabulary.items()}
    found = [names[i] for i in tokenizer.encode(text, add_special=False)]
    assert found == _join_best(text.replace(" ", "▁"), PIECES)


def test_of_equal_scores_the_leftmost_is_joined() -> None:
    """Mistral's runs of spaces all score the same; their order is that of its vocabulary."""
    runs = {"▁" * length: -1e9 for length in (2, 4, 8, 16, 5, 6, 12, 13, 10, 14, 3, 9, 7, 11, 1)}
    tokenizer = _sentencepiece(runs, add_space_prefix=False)
    names = {token_id: token for token, token_id in tokenizer.vocabulary.items()}
    for length in range(1, 70):
        found = [names[i] for i in tokenizer.encode(" " * length, add_special=False)]
        assert found == _join_best("▁" * length, runs), length


@given(text=st.text(max_size=12))
def test_sentencepiece_bytes_round_trip(text: str) -> None:
    ids = SENTENCEPIECE.encode(text, add_special=False)
    assert b"".join(map(SENTENCEPIECE.token_bytes, ids)) == text.replace("▁", " ").encode()
    assert not SENTENCEPIECE.special_ids.intersection(ids)


SENTENCEPIECE = _sentencepiece(add_space_prefix=False)


def test_sentencepiece_prefix_and_begin_token() -> None:
    tokenizer = _sentencepiece()
    assert tokenizer.encode("ab") == [1, tokenizer.token_id("▁ab")]
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
    assert tokenizer.encode("</s>")[1:] != [2]
    assert tokenizer.encode("</s>", add_special=False, parse_special=True) == [2]
    assert _sentencepiece(add_bos_token=False).encode("ab") == tokenizer.encode("ab")[1:]
    assert tokenizer.eos_ids == (2,)


def test_space_behind_special_tokens_of_phi_3() -> None:
    """Its own tokenizer drops it behind all but a few, which files do not say."""
    phi, llama = (
        _sentencepiece(user_defined=("<|user|>",), add_space_prefix=False, architecture=name)
        for name in ("phi3", "llama")
    )
    a, spaced = phi.token_id("a"), phi.token_id("▁a")
    for mark, behind in (("<|user|>", a), ("</s>", a), ("<s>", spaced)):
        ids = [each.encode(f"{mark} a", add_special=False, parse_special=True) for each in (phi, llama)]
        assert ids == [[phi.token_id(mark), behind], [phi.token_id(mark), spaced]]


def test_fill_in_the_middle_tokens_of_codegemma() -> None:
    """Its vocabulary is SentencePiece's, and marks them as the user's."""
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>")
    tokenizer = _sentencepiece(user_defined=names, add_space_prefix=False)
    found, ids = FimTokens.of(tokenizer), [tokenizer.token_id(name) for name in names]
    assert (found.template.name, found.template.spaced) == ("qwen", False)
    assert [found.prefix, found.suffix, found.middle, found.file] == ids
    assert set(ids) <= set(found.ends)
    assert tokenizer.encode("<|fim_prefix|>", add_special=False) != ids[:1]  # text of a user's forges none


def test_fill_in_the_middle_tokens_of_granite() -> None:
    names = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<reponame>", "<filename>"]
    vocabulary = _pairs("ab")
    tokens, types = vocabulary["tokens"] + names, [1] * len(vocabulary["tokens"]) + [3] * len(names)
    tokenizer = _convert(pre="refact", **vocabulary | {"tokens": tokens, "token_type": types})
    found, ids = FimTokens.of(tokenizer), [tokenizer.token_id(name) for name in names]
    assert found.template.name == "starcoder"
    assert [found.prefix, found.suffix, found.middle, found.repo, found.file] == [*ids[:3], *ids[4:]]
    assert set(ids) == set(found.ends)


def test_byte_level_equals_its_source(tiny: Tiny, tmp_path: Path) -> None:
    write_tiny_gguf(tiny("qwen2"), tmp_path / "m.gguf")
    ours = load_model(str(tmp_path / "m.gguf"), dtype="int8", cache_dir=tmp_path).tokenizer
    theirs = load_model(str(tiny("qwen2")), dtype="int8", cache_dir=tmp_path).tokenizer
    assert ours.fingerprint == theirs.fingerprint
    for text in ("for i in range(10):\n    print(i)", "  é 世界 <|im_end|> 12", ""):
        for parse in (True, False):
            assert ours.encode(text, parse_special=parse) == theirs.encode(text, parse_special=parse)
    messages = [{"role": "user", "content": "hi"}]
    assert ours.encode_chat(messages) == theirs.encode_chat(messages)
    assert ours.eos_ids == (2, 0)  # the named one first, then the others that end a turn


def test_conversion_is_cached_and_repaired(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_gguf(tiny("llama"), tmp_path / "m.gguf")
    calls = []

    def counting(file: Any) -> Any:
        calls.append(file)
        return convert_gguf_tokenizer(file)

    monkeypatch.setattr("specdec.models.resolve.convert_gguf_tokenizer", counting)

    def load() -> Tokenizer:
        return load_model(str(tmp_path / "m.gguf"), dtype="int8", cache_dir=tmp_path).tokenizer

    first, second = load(), load()
    assert len(calls) == 1
    assert first.fingerprint == second.fingerprint
    assert (first.eos_ids, first.bos_id) == (second.eos_ids, second.bos_id)
    assert second.has_chat_template
    (cached,) = (tmp_path / "tokenizers").iterdir()
    for former, damaged in (('"vocab":{"', '"vocab":{"x'), (f'"eos_ids": [{first.eos_ids[0]}', '"eos_ids": [7')):
        calls.clear()
        assert former in cached.read_text()
        cached.write_text(cached.read_text().replace(former, damaged))
        third = load()
        assert (third.fingerprint, third.eos_ids, len(calls)) == (first.fingerprint, first.eos_ids, 1)
    cached.write_text("{")
    assert load().fingerprint == first.fingerprint
    assert len(calls) == 2


def _pairs(*texts: str) -> dict[str, Any]:
    """A byte-level vocabulary of single bytes and the given texts, each joined left to right."""
    from specdec.models.tokenizer import byte_level_alphabet

    tokens, merges = list(byte_level_alphabet()), []
    for text in texts:
        for end in range(2, len(text) + 1):
            merges.append(f"{text[: end - 1]} {text[end - 1]}")
            tokens.append(text[:end])
    return {"model": "gpt2", "tokens": tokens, "merges": merges}


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", [b"a", b" ", b" 1", b"2", b"3"]),  # its splitting keeps one space with the number
        ("smollm", [b"a", b"  ", b"1", b"2", b"3"]),  # digits are split off first
        ("qwen2", [b"a", b" ", b" ", b"1", b"2", b"3"]),  # a number takes no space, and digits stand alone
        ("llama-bpe", [b"a", b" ", b" ", b"12", b"3"]),  # up to three digits go together
        ("smaug-bpe", [b"a", b" ", b" ", b"12", b"3"]),
        ("dbrx", [b"a", b" ", b" ", b"12", b"3"]),
        ("seed-coder", [b"a", b" ", b" ", b"1", b"2", b"3"]),
        ("gpt-4o", [b"a", b" ", b" ", b"12", b"3"]),
    ],
)
def test_text_splitting_follows_the_file(pre: str, expected: list[bytes]) -> None:
    tokenizer = _convert(pre=pre, **_pairs("ĠĠ", "Ġ1", "12"))
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("a  123")] == expected


def test_seed_splits_line_breaks_from_signs() -> None:
    seed, qwen = (_convert(pre=pre, **_pairs("!Ċ", "ĊĊ")) for pre in ("seed-coder", "qwen2"))
    pieces = [[each.token_bytes(i) for i in each.encode("!\n\n a", add_special=False)] for each in (seed, qwen)]
    assert pieces == [[b"!", b"\n\n", b" ", b"a"], [b"!\n", b"\n", b" ", b"a"]]


def test_an_answer_of_phi_ends_with_its_turn() -> None:
    vocabulary = _pairs()
    size = len(vocabulary["tokens"])
    tokens, types = [*vocabulary["tokens"], "<|endoftext|>", "<|end|>"], [1] * size + [3, 3]
    tokenizer = _convert(pre="gpt-4o", **vocabulary | {"tokens": tokens, "token_type": types, "eos_token_id": size})
    assert tokenizer.eos_ids == (size, size + 1)


def test_words_split_at_capitals_and_keep_contractions() -> None:
    """As GPT-4o's; Mistral's split at capitals alone."""
    given = _pairs("aB", "a's", "//Ċ")
    for pre, expected in (
        ("gpt-4o", [b"a", b"B", b"a's", b"//\n"]),
        ("tekken", [b"a", b"B", b"a", b"'", b"s", b"//\n"]),
    ):
        tokenizer = _convert(pre=pre, **given)
        found = [
            tokenizer.token_bytes(i)
            for text in ("aB", "a's", "//\n")
            for i in tokenizer.encode(text, add_special=False)
        ]
        assert found == expected


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "tekken", "gpt-4o", "qwen2", "smaug-bpe", "dbrx", None])
def test_a_file_that_does_not_say_begins_texts_as_in_llama_cpp(pre: str | None) -> None:
    given = _pairs() | {"bos_token_id": 7} | ({} if pre is None else {"pre": pre})
    assert (_convert(**given).encode("a")[0] == 7) == (pre in ("llama-bpe", "llama3", "tekken"))
    assert _convert(**given, add_bos_token=False).encode("a")[0] != 7


def test_qwen_normalises() -> None:
    composed, decomposed = "é", "e\u0301"
    tokenizer = _convert(pre="qwen2", **_pairs())
    assert tokenizer.encode(decomposed) == tokenizer.encode(composed)
    assert _convert(pre="smollm", **_pairs()).decode(tokenizer.encode(composed)) == composed


def test_padding_rows_are_not_tokens() -> None:
    vocabulary = _pairs("ab")
    size = len(vocabulary["tokens"])
    tokens = [*vocabulary["tokens"], "<|im_end|>", f"[PAD{size + 1}]"]
    types = [1] * size + [3, 5]
    tokenizer = _convert(pre="gpt-2", **vocabulary | {"tokens": tokens, "token_type": types})
    assert tokenizer.vocab_size == size + 1
    assert tokenizer.eos_ids == (size,)


def test_a_file_may_have_a_template_for_tools() -> None:
    keys = {f"tokenizer.ggml.{name}": value for name, value in _pairs().items()}
    keys |= {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "<tool_call>{{ tools | length }}"}
    file: Any = SimpleNamespace(path=Path("m.gguf"), metadata=keys)
    tokenizer = Tokenizer(*convert_gguf_tokenizer(file))
    assert [tokenizer.render_chat([], tools=tools) for tools in (None, [{}])] == ["plain", "<tool_call>1"]


def test_a_file_that_does_not_say_how_it_splits_texts_is_named(caplog: pytest.LogCaptureFixture) -> None:
    _convert(pre="gpt-2", **_pairs())
    assert not caplog.records
    _convert(**_pairs())
    assert "m.gguf: lacks tokenizer.ggml.pre" in caplog.text


def test_damaged_vocabularies_are_rejected() -> None:
    with pytest.raises(UnsupportedModelError, match=r"m\.gguf: text splitting 'klingon' is not known"):
        _convert(pre="klingon", **_pairs())
    with pytest.raises(ModelError, match="256 tokens but 1 token types"):
        _convert(pre="gpt-2", **_pairs(), token_type=[1])
    with pytest.raises(ModelError, match="vocabulary is inconsistent"):
        _convert(pre="gpt-2", **_pairs() | {"merges": ["x yz"]})
    with pytest.raises(ModelError, match="no scores"):
        _convert(model="llama", tokens=["a"], token_type=[1])
