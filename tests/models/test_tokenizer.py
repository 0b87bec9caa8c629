"""The tokenizer: reversible, special tokens only where intended, chat templates."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import InvalidRequestError, ModelError
from specdec.models.hf import HFSource
from specdec.models.hf_tokenizer import load_hf_tokenizer
from specdec.models.tokenizer import Tokenizer, TokenizerInfo
from tests.models.tiny import SPECIALS, make_tiny_tokenizer

Tiny = Callable[[str], Path]

# Text that is likely to hold pieces of special tokens, in all states of repair
TEXT = st.lists(
    st.one_of(st.text(max_size=8), st.sampled_from([*SPECIALS, "<|", "im_start", "|>", " ", "\ufdd0"]))
).map("".join)


@pytest.fixture(scope="module")
def tokenizer(tiny: Tiny) -> Tokenizer:
    """The tiny models' tokenizer."""
    return load_hf_tokenizer(tiny("llama"), HFSource(tiny("llama")).config.vocab_size)


@pytest.fixture(scope="module")
def oracle(tiny: Tiny) -> Any:
    """transformers' tokenizer of the same folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny("llama"))


@given(text=TEXT)
def test_text_never_becomes_special_and_round_trips(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text)
    assert not tokenizer.special_ids.intersection(ids)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids) == text


@given(text=TEXT)
def test_parsed_text_agrees_with_transformers(text: str, tokenizer: Tokenizer, oracle: Any) -> None:
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    assert ids == oracle.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special=False) == text
    bare = text
    for name in SPECIALS:
        bare = bare.replace(name, "")
    assert tokenizer.decode(ids) == bare or any(name in bare for name in SPECIALS)


def test_special_ids_and_unknown_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_ids == {0, 1, 2}
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids) == (0, False, (2,))
    assert [tokenizer.token_bytes(i) for i in (0, 2)] == [b"<|endoftext|>", b"<|im_end|>"]
    assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.vocab_size == max(tokenizer.vocabulary.values()) + 1
    assert tokenizer.token_id("<|im_end|>") == 2
    assert tokenizer.token_id("no such token") is None


def test_single_tokens_may_be_parts_of_characters(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode("世")]
    assert len(pieces) == 3
    assert b"".join(pieces) == "世".encode()


def test_end_tokens_of_a_multimodal_folder(tiny: Tiny, tmp_path: Path) -> None:
    make_tiny_tokenizer(tmp_path)
    outer = {"bos_token_id": 1, "eos_token_id": [5, 7], "vision_config": {}, "text_config": {"vocab_size": 384}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert load_hf_tokenizer(tmp_path, HFSource(tiny("llama")).config.vocab_size).eos_ids == (5, 7, 2)
    outer["text_config"] = {"eos_token_id": 6}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert load_hf_tokenizer(tmp_path, HFSource(tiny("llama")).config.vocab_size).eos_ids == (6, 2)


def test_begin_token(tiny: Tiny, tmp_path: Path) -> None:
    make_tiny_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": True}))
    config = HFSource(tiny("llama")).config
    tokenizer = load_hf_tokenizer(tmp_path, config.vocab_size)
    assert tokenizer.encode("a")[0] == 0
    assert tokenizer.encode("a", add_special=False) == tokenizer.encode("a")[1:]
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}])[:2] == [0, 1]
    data = json.loads((tmp_path / "tokenizer.json").read_text())  # the same, from a post-processor instead
    single = [{"SpecialToken": {"id": SPECIALS[0], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {SPECIALS[0]: {"id": SPECIALS[0], "ids": [0], "tokens": [SPECIALS[0]]}}
    template = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    processors = {"type": "Sequence", "processors": [template]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data | {"post_processor": processors}))
    for silent in (settings, settings | {"add_bos_token": None}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(silent))
        assert load_hf_tokenizer(tmp_path, config.vocab_size).encode("a") == tokenizer.encode("a")
    named = {"bos_token": {"content": settings.pop("bos_token"), "lstrip": False}}  # older folders name it elsewhere
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_hf_tokenizer(tmp_path, config.vocab_size).encode("a") == tokenizer.encode("a")[1:]
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    assert load_hf_tokenizer(tmp_path, config.vocab_size).encode("a") == tokenizer.encode("a")


def test_control_names_are_special_even_when_not_marked(tmp_path: Path) -> None:
    make_tiny_tokenizer(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in data["added_tokens"]:
        token["special"] = False
    tokenizer = Tokenizer(json.dumps(data), TokenizerInfo())
    assert tokenizer.special_ids == {0, 1, 2}
    assert not {0, 1, 2} & set(tokenizer.encode("<|im_start|>"))


def test_chat_is_rendered_and_parsed_like_transformers(tokenizer: Tokenizer, oracle: Any) -> None:
    messages = [{"role": "user", "content": "Read  this.\n"}, {"role": "assistant", "content": "I did"}]
    for generate in (True, False):
        rendered = tokenizer.render_chat(messages, variables={"add_generation_prompt": generate})
        kwargs = {"add_generation_prompt": generate, "return_dict": False}
        assert rendered == oracle.apply_chat_template(messages, tokenize=False, **kwargs)
        expected = oracle.apply_chat_template(messages, **kwargs)
        assert tokenizer.encode_chat(messages, variables={"add_generation_prompt": generate}) == expected


@given(text=TEXT)
def test_a_message_cannot_forge_a_turn(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": text}])
    assert [i for i in ids if i in tokenizer.special_ids] == [1, 2, 1]
    spoken = text.replace("\ufdd0", "")
    whole = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert whole == f"<|im_start|>user\n{spoken}<|im_end|>\n<|im_start|>assistant\n"


def test_template_helpers() -> None:
    def render(template: str, **variables: str) -> str:
        serialised = json.dumps(
            {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
        )
        info = TokenizerInfo(chat_template=template, template_variables=variables)
        return Tokenizer(serialised, info).render_chat([{"role": "user", "content": "<é>"}])

    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "<é>"}'
    assert render("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}") == "x\n"
    assert (
        render("{{ bos_token }}{% generation %}{{ messages[0].content }}{% endgeneration %}", bos_token="B") == "B<é>"
    )
    assert render("{% for m in messages %}{% break %}{% endfor %}-{{ add_generation_prompt }}") == "-True"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    with pytest.raises(InvalidRequestError, match=r"messages: .*roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    for broken in ("{% if %}", "{% break %}", "{{ 10**5000 }}"):
        with pytest.raises(ModelError, match="cannot be compiled"):
            render(broken)
    with pytest.raises(InvalidRequestError, match="unsafe"):
        render("{{ ''.__class__.__mro__ }}")
    with pytest.raises(InvalidRequestError, match=r"messages: .*refused them: MemoryError"):
        render("{{ 'a' * 10**18 }}")
    with pytest.raises(InvalidRequestError, match=r"messages: .*refused them: expected length >= 2"):
        render("{{ 'text' | truncate(1, false, '..') }}")


def test_a_missing_template_is_reported(tiny: Tiny) -> None:
    bare = Tokenizer((tiny("llama") / "tokenizer.json").read_text(), TokenizerInfo())
    assert not bare.has_chat_template
    with pytest.raises(ModelError, match="no chat template; send a plain prompt"):
        bare.render_chat([{"role": "user", "content": "x"}])
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer("{}", TokenizerInfo())


def test_vocabularies_are_compared(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = json.loads(make_tiny_tokenizer(tmp_path).to_str())
    same = Tokenizer(json.dumps(data), TokenizerInfo())
    assert same.fingerprint == tokenizer.fingerprint
    vocabulary = data["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    swapped = Tokenizer(json.dumps(data), TokenizerInfo())
    assert swapped.fingerprint != tokenizer.fingerprint
    last = max(vocabulary, key=vocabulary.__getitem__)
    data["model"]["merges"].pop()
    del vocabulary[last]
    shorter = Tokenizer(json.dumps(data), TokenizerInfo())
    assert shorter.fingerprint not in (tokenizer.fingerprint, swapped.fingerprint)


def test_tokenizers_in_use_share_a_vocabulary(tiny: Tiny) -> None:
    first, second = (load_hf_tokenizer(tiny("llama"), 384) for _ in range(2))
    assert second._backend is first._backend
    del first
    assert load_hf_tokenizer(tiny("qwen2"), 384)._backend is second._backend


@pytest.mark.parametrize("letter", ["a", "C"])
def test_the_frame_of_a_vocabulary_of_few_letters(letter: str, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({letter: 0, "<s>": 1}, unk_token="<unk>"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    assert load_hf_tokenizer(tmp_path, 2).encode(letter) == [1, 0]


@given(text=TEXT, parse_special=st.booleans())
def test_a_large_text_has_the_ids_of_a_small_one(text: str, parse_special: bool, tokenizer: Tokenizer) -> None:
    text = text * 30
    ids = tokenizer.encode(text, parse_special=parse_special)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.models.tokenizer._LARGE_CHARACTERS", -1)
        assert tokenizer.encode(text, parse_special=parse_special) == ids
    assert len(ids) * tokenizer.longest_token >= len(text)


def test_other_threads_run_while_a_large_text_is_encoded(tokenizer: Tokenizer) -> None:
    """The library's plain call would block them. A short text does not wait."""
    text, begun, done = "def f(x): return x\n" * 60_000, threading.Event(), threading.Event()

    def encode() -> None:
        begun.set()
        tokenizer.encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    assert begun.wait(30)
    turns = 0
    while not done.wait(0.001):
        tokenizer.encode("a few words", parse_special=turns % 2 == 1)
        turns += 1
    thread.join()
    assert turns > 10
