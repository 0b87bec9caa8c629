"""Prompts: within the budget, nearest text first, and the same at their front while somebody types."""

from __future__ import annotations

import inspect
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.completion.documents import ContextFile, FillMode, Gap
from server.completion.prompt_packer import SMALLEST_BUDGET, PackedPrompt, PromptPacker
from server.completion.prompt_parts import TOP_LEVEL, line_breaks
from specdec.core.types import StoppingParams
from tests.server.completion.code_tokenizer import CodeTokenizer, encoded

TOKENIZER = CodeTokenizer()
PACKER = PromptPacker(TOKENIZER, 1 << 20)
PRE, SUF, MID = (TOKENIZER.names[f"<|fim_{name}|>"] for name in ("prefix", "suffix", "middle"))
CODE = st.text(st.sampled_from(list("ab (){}=\n\n    \té世")), max_size=600)
LINES = st.lists(st.text("abc =()", max_size=30), max_size=60).map("\n".join)
TEXT = CODE | LINES
FILES = st.lists(
    st.builds(ContextFile, st.sampled_from(["a.py", "b.py", "dir/c.py"]), TEXT, st.floats(0, 1), st.integers(0, 5)),
    max_size=4,
).map(tuple)
GAPS = st.builds(Gap, TEXT, TEXT, st.none() | st.integers(0, 50), FILES, st.sampled_from(["", "repo"]), st.just("a.py"))
SOURCE = inspect.getsource(os) + inspect.getsource(random)


def spelled(packed: PackedPrompt) -> tuple[int, ...]:
    """The prompt, and the word that is to be spelled behind it."""
    return (*packed.ids, *packed.healing_prefix.encode())


def parts(packed: PackedPrompt) -> tuple[str, str, str, str]:
    """Context, above, suffix, head of a prompt."""
    ids = spelled(packed)
    pre, suf, mid = (ids.index(i) for i in (PRE, SUF, MID))
    assert pre < suf < mid
    decode = lambda piece: TOKENIZER.shown(piece)  # noqa: E731
    return decode(ids[:pre]), decode(ids[pre + 1 : suf]), decode(ids[suf + 1 : mid]), decode(ids[mid + 1 :])


@settings(max_examples=200)
@given(gap=GAPS, budget=st.integers(SMALLEST_BUDGET, 900))
def test_the_budget_holds_and_the_nearest_text_is_kept(gap: Gap, budget: int) -> None:
    packed = PACKER.pack(gap, FillMode.MIDDLE, budget)
    assert len(packed.ids) <= budget
    pre, suf, mid = (packed.ids.index(i) for i in (PRE, SUF, MID))
    kept = bytes(packed.ids[pre + 1 : suf] + packed.ids[mid + 1 :]) + packed.healing_prefix.encode()
    assert gap.prefix.encode().endswith(kept)
    assert gap.suffix.encode().startswith(bytes(packed.ids[suf + 1 : mid]))
    # A quarter of the budget may stay unused so that the start of the prompt stays the same, and the remainder of a
    # boundary.
    if len(kept) < len(gap.prefix.encode()) and not gap.files and not gap.repo:
        assert len(kept) >= budget // 8
    assert not packed.healing_prefix or gap.prefix.endswith(packed.healing_prefix)
    whole = len(gap.prefix.encode()) + len(gap.suffix.encode())
    if not gap.files and not gap.repo and whole + 3 <= budget // 2 and len(gap.suffix.encode()) <= budget // 4 - 1:
        assert len(spelled(packed)) == whole + 3


@given(gap=GAPS, budget=st.integers(SMALLEST_BUDGET, 900))
def test_prefix_only_omits_the_suffix(gap: Gap, budget: int) -> None:
    packed = PACKER.pack(gap, FillMode.PREFIX, budget)
    assert len(packed.ids) <= budget
    assert not {PRE, SUF, MID} & set(packed.ids)
    kept = [i for i in spelled(packed) if i < 256]
    assert not gap.prefix or bytes(kept)[-1:] == gap.prefix.encode()[-1:]


@pytest.mark.parametrize(
    ("prefix", "path", "shown", "healed"),
    [
        ("", "a.py", "# a.py\n", ""),
        ("impor", "a.py", "# a.py\n", "impor"),
        ("import o", "a.py", "import", " o"),
        ("impor", "", "impor", ""),
        ("", "", "", ""),
    ],
)
def test_bug_a_file_s_first_word_had_no_prompt(prefix: str, path: str, shown: str, healed: str) -> None:
    """As with SmolLM2, which has neither a begin token nor marks of a gap."""
    packed = PromptPacker(CodeTokenizer(()), 4096).pack(Gap(prefix, path=path), FillMode.PREFIX, SMALLEST_BUDGET)
    assert bytes(packed.ids).decode() == shown
    assert (packed.healing_prefix, packed.n_healing_tokens) == (healed, len(healed))


@given(prefix=TEXT, suffix=TEXT, typed=st.text("abc =(){}é", max_size=8))
def test_typing_on_a_line_only_appends(prefix: str, suffix: str, typed: str) -> None:
    before = PACKER.pack(Gap(prefix, suffix), FillMode.MIDDLE, 4096)
    after = PACKER.pack(Gap(prefix + typed, suffix), FillMode.MIDDLE, 4096)
    assert spelled(after) == (*spelled(before), *typed.encode())


@pytest.mark.parametrize(("budget", "most"), [(600, 20), (2000, 12), (4000, 5)])
def test_typing_in_a_file_keeps_the_cached_prefix(budget: int, most: int) -> None:
    start, end = len(SOURCE) // 2, len(SOURCE) // 2 + 1500
    suffix, shared, before = SOURCE[end:][:9000], [], ()
    for cursor in range(start, end):
        ids = PACKER.pack(Gap(SOURCE[:cursor], suffix), FillMode.MIDDLE, budget).ids
        assert len(ids) <= budget
        same = next((i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), len(before))
        shared.append(same / len(ids))
        before = ids
    assert sum(share < 0.5 for share in shared) <= most  # of 1500 keys
    assert sorted(shared)[len(shared) // 2] > 0.9


@given(text=TEXT, more=st.text("ab\n ", max_size=20))
def test_boundaries_are_stable_when_text_is_added(text: str, more: str) -> None:
    for before in (False, True):
        old, new = line_breaks(text, before=before), line_breaks(text + more, before=before)
        end = text.rfind("\n")
        assert [b for b in new if b.at < end] == [b for b in old if b.at < end]


@given(text=LINES, cut=st.integers(0, 40))
def test_a_part_of_the_text_has_the_same_boundaries(text: str, cut: int) -> None:
    lines = text.split("\n")
    part = "\n".join(lines[min(cut, len(lines) - 1) :])
    gone = len(text) - len(part)
    whole = {b.at - gone: b.level for b in line_breaks(text)}
    known = [i for i, line in enumerate(part.split("\n")) if line.strip()]
    if len(known) > 2:  # behind the first two lines that show something
        settled = len("\n".join(part.split("\n")[: known[1] + 1]))
        assert all(whole[b.at] == b.level for b in line_breaks(part) if b.at > settled and b.level < TOP_LEVEL)


def test_the_frequency_of_a_level_falls_with_its_height() -> None:
    found = [b.level for b in line_breaks(SOURCE)[1:]]
    assert len(found) > 1500
    for level in range(1, 5):
        share = sum(b >= level for b in found) / len(found)
        assert 0.6 * 2.0**-level < share < 1.6 * 2.0**-level


def test_long_lines_are_split() -> None:
    text = "x" * 5000
    packed = PACKER.pack(Gap(text), FillMode.MIDDLE, 500)
    more = PACKER.pack(Gap(text + "y"), FillMode.MIDDLE, 500)
    assert 250 <= len(packed.ids) <= 500
    assert [b.at for b in line_breaks(text)] == [0, 1024, 2048, 3072, 4096]
    assert spelled(more) == (*spelled(packed), ord("y"))


def test_the_middle_starts_at_the_given_offset() -> None:
    packed = PACKER.pack(Gap("one\ntwo\nthree", "four", head_from=8), FillMode.MIDDLE, 900)
    assert (packed.healing_prefix, packed.n_healing_tokens) == ("three", 5)
    assert parts(packed) == ("", "one\ntwo\n", "four", "three")


def test_context_is_selected_by_relevance_and_has_a_stable_order() -> None:
    files = (
        ContextFile("z.py", "z" * 50, score=0.9),
        ContextFile("m.py", "m" * 50, score=0.1),
        ContextFile("a.py", "a" * 50, score=0.5, time_ms=2),
        ContextFile("b.py", "b" * 50, score=0.5, time_ms=1),
    )
    room = 4 * 200 + 40  # a quarter for three of them and their names
    found = [
        PACKER.pack(Gap("p" * 2000, files=order, repo="R", path="own.py"), FillMode.MIDDLE, room)
        for order in (files, files[::-1], files[2:] + files[:2])
    ]
    assert found[0].ids == found[1].ids == found[2].ids
    context = parts(found[0])[0]
    assert context.startswith("<|repo_name|>R\n<|file_sep|>a.py\naaa")
    assert context.endswith("<|file_sep|>own.py\n")
    assert [name in context for name in ("a.py", "b.py", "m.py", "z.py")] == [True, True, False, True]


def test_of_equal_texts_the_newest_then_the_last_is_kept() -> None:
    files = tuple(ContextFile(f"{i}.py", f"{i}" * 60, time_ms=10 * (i == 0)) for i in range(4))
    context = parts(PACKER.pack(Gap("p" * 2000, files=files, path="x"), FillMode.MIDDLE, 660))[0]
    assert [f"<|file_sep|>{i}.py" in context for i in range(4)] == [True, False, False, True]


def test_a_too_long_text_is_cut_after_a_line() -> None:
    files = (ContextFile("a.py", "\n".join(["0123456789"] * 100)),)
    context = parts(PACKER.pack(Gap("p" * 500, files=files, path="x"), FillMode.MIDDLE, 400))[0]
    body = context.removeprefix("<|file_sep|>a.py\n").removesuffix("<|file_sep|>x\n")
    assert body
    assert set(body.splitlines()) == {"0123456789"}


def test_names_too_long_for_the_budget_are_omitted() -> None:
    gap = Gap("p" * 100, "s" * 100, files=(ContextFile("f" * 900, "text"),), repo="r" * 900, path="q" * 900)
    assert len(PACKER.pack(gap, FillMode.MIDDLE, SMALLEST_BUDGET).ids) <= SMALLEST_BUDGET


def test_the_suffix_gets_the_budget_that_the_prefix_leaves() -> None:
    short = parts(PACKER.pack(Gap("p", "s" * 5000), FillMode.MIDDLE, 803))
    assert len(short[2]) == 200 + 300  # its quarter, and three eighths of the prefix's half
    long = parts(PACKER.pack(Gap("p\n" * 2000, "s" * 5000), FillMode.MIDDLE, 803))
    assert len(long[2]) == 200


def test_encode_returns_the_prompt_of_two_texts() -> None:
    ids = encoded(PACKER, "def f():\n    re", "\n")
    assert TOKENIZER.shown(ids) == "<|fim_prefix|>def f():\n    re<|fim_suffix|>\n<|fim_middle|>"


def test_many_equal_lines_are_packed_within_the_budget() -> None:
    found = PACKER.pack(Gap("a\n" * 50_000), FillMode.MIDDLE, 20_000)
    assert 10_000 < len(found.ids) <= 20_000


def test_the_tokens_of_a_healing_prefix_do_not_count() -> None:
    packed = PACKER.pack(Gap("one\nthree", "four"), FillMode.MIDDLE, 900)
    limits = packed.limits(StoppingParams(max_tokens=4, min_tokens=2, stop_token_ids=(7, packed.ends[0])))
    assert (limits.max_tokens, limits.min_tokens) == (9, 7)
    assert sorted(limits.stop_token_ids) == sorted({7, *packed.ends})
    unset = packed.limits(StoppingParams(max_tokens=0))
    assert (unset.max_tokens, unset.min_tokens) == (0, 0)
