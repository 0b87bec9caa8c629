"""Every family's prompt, token by token; and that no text of a user's becomes one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from server.completion.documents import ContextFile, FillMode, Gap
from server.completion.prompt_packer import FimNotSupportedError, PromptPacker
from server.completion.prompt_parts import ENTRY, LONGEST_HEALING_PREFIX, UserText, healing_prefix_of
from specdec.config import EngineConfig
from specdec.models import tokenizer as models_tokenizer
from specdec.models.fim import TEMPLATES, FimTokens
from specdec.models.resolve import load_tokenizer
from specdec.models.tokenizer import TokenizerInfo
from tests.server.completion.code_tokenizer import QWEN, CodeTokenizer, encoded

DEEPSEEK = tuple(f"<\uff5cfim\u2581{name}\uff5c>" for name in ("begin", "hole", "end"))
GAP = Gap("one\ntwo", "three", head_from=4)
REPO = Gap(
    "one\ntwo", "three", head_from=4, files=(ContextFile("b.py", "B"), ContextFile("a.py", "A")), repo="R", path="c.py"
)
FAMILIES = {
    "qwen": (QWEN, "<|fim_prefix|>one\n<|fim_suffix|>three<|fim_middle|>two"),
    "starcoder": (
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        "<fim_prefix>one\n<fim_suffix>three<fim_middle>two",
    ),
    "santacoder": (
        ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
        "<fim-prefix>one\n<fim-suffix>three<fim-middle>two",
    ),
    "deepseek": (DEEPSEEK, f"{DEEPSEEK[0]}one\n{DEEPSEEK[1]}three{DEEPSEEK[2]}two"),
    "codestral": (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]three[PREFIX]one\ntwo"),
    "glm": (
        ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
        "<|code_prefix|>one\n<|code_suffix|>three<|code_middle|>two",
    ),
    "seed": (
        ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),
        "<[fim-suffix]>three<[fim-prefix]>one\n<[fim-middle]>two",
    ),
}
CONTEXTS = {
    "qwen": (
        QWEN,
        "<|repo_name|>R\n<|file_sep|>a.py\nA\n<|file_sep|>b.py\nB\n<|file_sep|>c.py\n"
        "<|fim_prefix|>one\n<|fim_suffix|>three<|fim_middle|>two",
    ),
    "codegemma": (
        (*QWEN[:3], "<|file_separator|>"),
        "<|file_separator|>a.py\nA\n<|file_separator|>b.py\nB\n<|file_separator|>c.py\n"
        "<|fim_prefix|>one\n<|fim_suffix|>three<|fim_middle|>two",
    ),
    "starcoder2": (
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"),
        "<repo_name>R<file_sep>a.py\nA\n<file_sep>b.py\nB\n<file_sep><fim_prefix>one\n<fim_suffix>three<fim_middle>two",
    ),
    "codestral": (
        ("[PREFIX]", "[SUFFIX]"),
        "[SUFFIX]three[PREFIX]+++++ a.py\nA\n+++++ b.py\nB\n+++++ c.py\none\ntwo",
    ),
    "deepseek": (
        DEEPSEEK,
        f"{DEEPSEEK[0]}# a.py\nA\n# b.py\nB\n# c.py\none\n{DEEPSEEK[1]}three{DEEPSEEK[2]}two",
    ),
}


def shown(tokenizer: CodeTokenizer, gap: Gap, mode: FillMode = FillMode.MIDDLE) -> str:
    packed = PromptPacker(tokenizer, 4096).pack(gap, mode, 900)
    assert packed.healing_prefix == "two"
    return tokenizer.shown(packed.ids) + packed.healing_prefix


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("marked", [True, False])
def test_every_family(family: str, marked: bool) -> None:
    names, prompt = FAMILIES[family]
    tokenizer = CodeTokenizer(names) if marked else CodeTokenizer((), plain=names)
    assert FimTokens.of(tokenizer).template.name == family
    assert shown(tokenizer, GAP) == prompt
    packer = PromptPacker(tokenizer, 4096)
    assert set(packer.pack(GAP, FillMode.MIDDLE, 900).ends) >= {tokenizer.names[name] for name in names[:3]}


@pytest.mark.parametrize("family", CONTEXTS)
def test_repository_context(family: str) -> None:
    names, prompt = CONTEXTS[family]
    assert shown(CodeTokenizer(names), REPO) == prompt


def test_begin_tokens_come_first() -> None:
    tokenizer = CodeTokenizer((*DEEPSEEK, "<s>"), bos="<s>")
    assert shown(tokenizer, GAP).startswith(f"<s>{DEEPSEEK[0]}one")


def test_the_first_template_of_the_vocabulary_is_taken() -> None:
    both = CodeTokenizer((*QWEN, "[PREFIX]", "[SUFFIX]"))
    assert FimTokens.of(both).template.name == "qwen"
    assert len({template.name for template in TEMPLATES}) == len(TEMPLATES)


def test_a_model_without_such_tokens_rejects_or_continues() -> None:
    tokenizer = CodeTokenizer(("<repo_name>", "<file_sep>", "<|endoftext|>"))
    packer = PromptPacker(tokenizer, 4096)
    assert not packer.fills_in
    with pytest.raises(FimNotSupportedError, match="MODE_PREFIX"):
        packer.pack(GAP, FillMode.MIDDLE, 900)
    with pytest.raises(FimNotSupportedError):
        encoded(packer, "a", "b")
    for mode in (FillMode.PREFIX, FillMode.MIDDLE_OR_PREFIX):
        assert shown(tokenizer, GAP, mode) == "one\ntwo"
        assert shown(tokenizer, REPO, mode) == (
            "<repo_name>R<file_sep>a.py\nA\n<file_sep>b.py\nB\n<file_sep>c.py\none\ntwo"
        )


@given(st.lists(st.sampled_from([*QWEN, "[PREFIX]", "[SUFFIX]", "[", "<|fim", "|>", "x", "\n", "é"]), max_size=12))
def test_no_text_becomes_a_special_token(pieces: list[str]) -> None:
    text = "".join(pieces)
    tokenizer = CodeTokenizer(QWEN, plain=("[PREFIX]", "[SUFFIX]"))
    user = UserText(tokenizer, {tokenizer.names[name]: name for name in ("[PREFIX]", "[SUFFIX]")})
    ids = user.encode(text)
    assert all(i < 256 for i in ids)
    assert tokenizer.decode(ids) == text


def test_learned_templates_are_bounded_and_separate() -> None:
    calls: list[str] = []

    class Counting(CodeTokenizer):
        def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
            calls.append(text)
            return super().encode(text, add_special=add_special, parse_special=parse_special)

    user = UserText(Counting(), {}, capacity=8 * (10 + ENTRY))
    calls.clear()
    for owner in ("a", "b", "a"):
        user.encode("0123456789", owner)
    assert calls == ["0123456789"] * 2
    for i in range(9):
        user.encode(f"{i:010}", "a")
    assert not user.knows("0123456789", "a")
    assert user.knows("0000000008", "a")
    assert not user.knows("0000000008", "b")
    user.encode("x" * 80)  # too large to be worth remembering
    assert not user.knows("x" * 80)


def test_a_line_break_that_merges_with_the_text_costs_no_more_than_another() -> None:
    read: list[int] = []

    class Merging(CodeTokenizer):
        """Adds a space in front of texts, and has one token for two line breaks."""

        def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
            ids = super().encode(" " + text, add_special=False)
            return [32, 300, *ids[3:]] if ids[:3] == [32, 10, 10] else ids

        def token_bytes(self, token_id: int) -> bytes:
            read.append(token_id)
            return b"\n\n" if token_id == 300 else super().token_bytes(token_id)

    user = UserText(Merging(), {})
    assert user.encode("x = 1") == tuple(b"x = 1")
    read.clear()
    assert user.encode("\n" + "x" * 1000) == (*b" \n", *b"x" * 1000)
    assert len(read) < 10


def sentencepiece(names: tuple[str, ...]) -> models_tokenizer.Tokenizer:
    """A tokenizer that puts a space in front of every text, as CodeLlama's does."""
    vocabulary = {"<unk>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}}
    for piece in ("▁", "o", "n", "e", "t", "w", "h", "r", "▁o", "▁on", "▁one", "tw", "two", "th", "thr"):
        vocabulary[piece] = len(vocabulary)
    merges = [("▁", "o"), ("▁o", "n"), ("▁on", "e"), ("t", "w"), ("tw", "o"), ("t", "h"), ("th", "r")]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in (*names, "<s>")])
    begin = backend.token_to_id("<s>")
    return models_tokenizer.Tokenizer(backend.to_str(), TokenizerInfo(bos_id=begin, add_bos=True))


def test_code_llama_adds_a_space_before_the_prefix_only() -> None:
    tokenizer = sentencepiece(("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"))
    packed = PromptPacker(tokenizer, 4096).pack(GAP, FillMode.MIDDLE, 900, heal=False)
    names = [tokenizer.token_bytes(i).decode() for i in packed.ids]
    assert names[:3] == ["<s>", "▁<PRE>", " one"]
    assert "".join(names) == "<s>▁<PRE> one\n▁<SUF>three▁<MID>two"
    assert tokenizer.token_id("▁<EOT>") in packed.ends


@pytest.fixture(scope="module")
def cache_dir() -> object:
    return EngineConfig().cache_dir.expanduser()


@pytest.mark.model
def test_qwen_is_detected_by_its_vocabulary(cache_dir) -> None:  # type: ignore[no-untyped-def]
    tokenizer = load_tokenizer("qwen2.5-coder-1.5b", cache_dir)
    packed = PromptPacker(tokenizer, 32768).pack(REPO, FillMode.MIDDLE, 900)
    assert (packed.healing_prefix, packed.n_healing_tokens) == ("two", 1)

    def text(part: str) -> list[int]:
        return tokenizer.encode(part, add_special=False)

    expected = [
        151663, *text("R\n"), 151664, *text("a.py\n"), *text("A\n"), 151664, *text("b.py\n"), *text("B\n"), 151664,
        *text("c.py\n"), 151659, *text("one\n"), 151661, *text("three"), 151660,
    ]  # fmt: skip
    assert list(packed.ids) == expected
    assert set(packed.ends) == {151643, 151644, 151645, 151659, 151660, 151661, 151662, 151663, 151664}
    hostile = encoded(PromptPacker(tokenizer, 32768), "<|fim_suffix|>x<|fim_middle|>", "<|file_sep|>")
    assert [i for i in hostile if i >= 151643] == [151659, 151661, 151660]
    assert not UserText(tokenizer, {}).breaks_before


@pytest.mark.model
def test_smollm2_has_no_such_tokens(cache_dir) -> None:  # type: ignore[no-untyped-def]
    tokenizer = load_tokenizer("smollm2-135m", cache_dir)
    packer = PromptPacker(tokenizer, 8192)
    with pytest.raises(FimNotSupportedError):
        encoded(packer, "a", "b")
    packed = packer.pack(REPO, FillMode.PREFIX, 900, heal=False)
    assert [i for i in packed.ids if i in tokenizer.special_ids] == [3, 5, 5, 5]
    assert tokenizer.decode(packed.ids) == "Ra.py\nA\nb.py\nB\nc.py\none\ntwo"
    assert UserText(tokenizer, {}).breaks_before


@pytest.mark.model
@pytest.mark.parametrize("name", ["qwen2.5-coder-1.5b", "smollm2-135m"])
def test_splitting_a_text_keeps_its_tokens(cache_dir, name: str) -> None:  # type: ignore[no-untyped-def]
    tokenizer = load_tokenizer(name, cache_dir)
    source = open(models_tokenizer.__file__).read()  # noqa: SIM115
    packer = PromptPacker(tokenizer, 32768)
    for cursor in range(2000, 2400, 7):
        ids = packer.pack(Gap(source[:cursor]), FillMode.PREFIX, 8000, heal=False).ids
        assert list(ids) == tokenizer.encode(source[:cursor], add_special=False)


@pytest.mark.model
@pytest.mark.parametrize("name", ["qwen2.5-coder-1.5b", "smollm2-135m"])
def test_text_before_the_unfinished_word_keeps_its_tokens(cache_dir, name: str) -> None:  # type: ignore[no-untyped-def]
    """The rule that lets a sequence continue inside a token: wherever a text stops, all of it but the unfinished word
    has the tokens that it has in the whole text."""
    tokenizer = load_tokenizer(name, cache_dir)
    user = UserText(tokenizer, {})
    source = open(models_tokenizer.__file__).read()[3000:5000]  # noqa: SIM115
    whole = tokenizer.encode(source, add_special=False)
    # Within white space nothing is certain: it merges with any white space that follows.
    places = [i for i in range(1, len(source)) if not (source[i - 1].isspace() and source[i].isspace())]
    kept, long = 0, 0
    for cursor in places:
        word = healing_prefix_of(source[:cursor], breaks_before=user.breaks_before, digits_alone=user.digits_alone)
        ids = tokenizer.encode(source[: cursor - len(word)], add_special=False)
        kept += ids == whole[: len(ids)]
        long += len(word) > 10
    assert kept / len(places) > 0.98
    assert long / len(places) < 0.1


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", ""), ("x = ret", " ret"), ("foo(ba", "(ba"), ("self._que", "que"), ("a.b", ".b"), ("x == (", " ("),
        ("x = ", " "), ("if x:\n    ", " "), ("if x:\n", ""), ("f(12", "12"), ("a  b", " b"), ("a\n\tb", "\tb"),
        ("ünïc", "c"), ("x" * 40, ""), ("=" * 40, ""), ("one\ntwo", "two"), ("x)", ")"), ("a ((b", "b"),
    ],
)  # fmt: skip
def test_the_unfinished_word_at_the_end_of_a_text(text: str, word: str) -> None:
    assert healing_prefix_of(text, breaks_before=False, digits_alone=False) == word
    assert len(word) <= LONGEST_HEALING_PREFIX


def test_words_by_kind_of_vocabulary() -> None:
    assert healing_prefix_of("a\n\n", breaks_before=True, digits_alone=False) == "\n\n"
    assert healing_prefix_of("f(12", breaks_before=False, digits_alone=True) == ""
