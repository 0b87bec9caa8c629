"""Collected texts: whole after any cut, of one target, and without runs of held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specdec.models.tokenizer import Tokenizer
from specdec.training.collect import Collector, repeats_itself
from specdec.training.texts import (
    GRAM,
    OWN,
    HeldOut,
    Prompt,
    Text,
    TextSplit,
    TextStore,
    TrainingError,
    chat_lead,
    given_files,
    given_prompts,
)
from tests.engine.tiny_engine import tiny_engine, tiny_parts
from tests.training.permuting_target import permuting_texts


def runs(tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[at : at + GRAM]) for at in range(len(tokens) - GRAM + 1)}


def stored(folder: Path, weights: str = "aa") -> list[list[int]]:
    return [text.tokens.tolist() for text in TextStore(folder, weights).read()]


def test_a_store_cut_at_any_byte_holds_the_complete_texts(tmp_path: Path) -> None:
    store, texts, ends = TextStore(tmp_path, "aa"), permuting_texts(4, length=40), []
    for text in texts:
        store.append(text)
        ends.append(store._writer.size)
    store.close()
    (path,) = tmp_path.glob("*.bin")
    data, expected = path.read_bytes(), [text.tokens.tolist() for text in texts]
    assert next(TextStore(tmp_path, "aa").read()).origin == OWN
    for size in range(len(data) - 1, -1, -1):
        path.write_bytes(data[:size])
        assert stored(tmp_path) == expected[: sum(end <= size for end in ends)], size
    again = TextStore(tmp_path, "aa")  # the next run writes to a file of its own, behind the torn one
    again.append(texts[3])
    assert stored(tmp_path) == [expected[3]]


def test_the_texts_of_another_target_are_refused(tmp_path: Path) -> None:
    TextStore(tmp_path, "aa").append(permuting_texts(1)[0])
    with pytest.raises(TrainingError, match="holds the texts of another target; give that --target, or another folder"):
        stored(tmp_path, "bb")
    next(tmp_path.glob("*.bin")).write_bytes(b"something else")
    with pytest.raises(TrainingError, match="is no file of texts; choose another folder"):
        stored(tmp_path)


def test_no_training_text_shares_a_run_with_a_held_out_prompt() -> None:
    texts = permuting_texts(400, length=48)
    copies = [Text(text.tokens[5:].copy(), 1, 20, greedy=False, origin="copied") for text in texts[::3]]
    benchmark = texts[7].tokens[10:25].tolist()
    split = TextSplit.of([*texts, *copies], [benchmark])
    assert split.held_out
    assert all(text.greedy and text.origin == OWN for text in split.held_out)
    banned = runs(benchmark).union(*(runs(text.content[: text.answer - text.lead]) for text in split.held_out))
    assert not any(runs(text.content) & banned for text in split.training)
    assert len(split.training) + len(split.held_out) + split.n_dropped == len(texts) + len(copies)
    assert split.n_dropped > 0
    again = TextSplit.of([*texts, *copies], [benchmark])
    assert [id(text) for text in again.held_out] == [id(text) for text in split.held_out]


@pytest.mark.parametrize("shared", [GRAM - 1, GRAM])
def test_ten_tokens_in_a_row_are_an_overlap(shared: int) -> None:
    held_out = HeldOut([list(range(100, 140))])
    assert held_out.overlaps([1, 2, *range(110, 110 + shared), 3]) == (shared == GRAM)


def test_the_target_answers_its_own_prompts_and_given_ones(tmp_path: Path) -> None:
    """On a real engine: answers are complete, prompts do not repeat, and a held-out prompt is left out."""
    parts, store = tiny_parts("qwen2"), TextStore(tmp_path, "aa")
    rng = np.random.default_rng(0)
    given = [Prompt(tuple(rng.integers(3, 250, 20).tolist()), 0, f"file {n}") for n in range(8)]
    collector = Collector(tiny_engine(parts), parts.tokenizer, store, HeldOut([given[2].ids]), [given[0], *given])
    lines: list[str] = []
    collector.run(1500, lines.append)
    texts = list(TextStore(tmp_path, "aa").read())
    assert sum(len(text.tokens) for text in texts) == collector.n_tokens
    prompts = [tuple(text.tokens[: text.answer].tolist()) for text in texts]
    assert len(set(prompts)) == len(prompts)
    assert given[2].ids not in prompts
    assert all(not repeats_itself(text.tokens[text.answer :].tolist()) for text in texts)
    assert {text.origin for text in texts} & {prompt.origin for prompt in given}
    assert "tokens" in lines[-1]
    assert not collector._writing
    resumed = Collector(tiny_engine(parts), parts.tokenizer, store, HeldOut([]))
    assert (resumed.n_texts, resumed.n_tokens) == (len(texts), collector.n_tokens)


def test_a_chat_template_without_the_users_text_leaves_prompts_of_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, store = tiny_parts("qwen2"), TextStore(tmp_path / "data", "aa")
    monkeypatch.setattr(Tokenizer, "has_chat_template", True)
    monkeypatch.setattr(Tokenizer, "render_chat", lambda *_, **__: "Hello")
    (tmp_path / "chat.jsonl").write_text('{"prompt": "What is a prime number?"}\n')
    notes: list[str] = []
    assert not list(given_prompts([tmp_path / "chat.jsonl"], parts.tokenizer, notes.append))
    assert "--texts: 1 lines" in notes[0]
    given = [Prompt(tuple(range(3 + n, 23 + n)), 0, f"file {n}") for n in range(4)]
    Collector(tiny_engine(parts), parts.tokenizer, store, HeldOut([]), given).run(100, lambda _: None)
    origins = {text.origin for text in TextStore(tmp_path / "data", "aa").read()}
    assert origins
    assert origins <= {prompt.origin for prompt in given}


@pytest.mark.parametrize("n_given", [0, 4])
def test_a_target_that_writes_no_usable_prompt_is_not_asked_for_ever(
    n_given: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.training.collect.chat_prompt", lambda *_: None)
    monkeypatch.setattr("specdec.training.collect._MOST_UNUSABLE", 64)
    parts, store = tiny_parts("qwen2"), TextStore(tmp_path, "aa")
    given = [Prompt(tuple(range(3 + n, 23 + n)), 0, f"file {n}") for n in range(n_given)]
    collector = Collector(tiny_engine(parts), parts.tokenizer, store, HeldOut([]), given)
    if n_given:
        assert "prompts and answers can be used (left out: " in collector.run(100_000, lambda _: None)
        assert collector.n_texts
    else:
        with pytest.raises(TrainingError, match=r"--texts: none of the last .* no prompt\); name files of plain text"):
            collector.run(100_000, lambda _: None)


def test_loops_are_recognised() -> None:
    assert repeats_itself([*range(100), *[1, 2, 3] * 22])
    assert not repeats_itself(list(range(100)))
    assert not repeats_itself([1, 2, 3] * 10)  # too short to tell


def test_given_files_become_prompts(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"--texts: no .txt, .md, .* file there"):
        given_files([tmp_path])
    tokenizer = tiny_parts().tokenizer
    (tmp_path / "a.py").write_text("def add(first, second):\n    return first + second\n" * 40)
    turns = [
        {"from": "human", "value": "Read it."},
        {"from": "gpt", "value": "Yes."},
        {"from": "human", "value": "Go."},
    ]
    breaks = json.dumps({"prompt": "Say\u2028so\x85."}, ensure_ascii=False)  # that end no line
    parts = json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello."}]}]})
    lines = [json.dumps({"conversations": turns}), breaks, "{broken", '{"messages": 3}', r'{"text": "Half \ud83d."}']
    lines += [parts, '["Hello."]', json.dumps({"conversations": turns[1:2]}), json.dumps({"text": "Too long. " * 999})]
    latin = '{"prompt": "café"}'.encode("latin-1")
    (tmp_path / "b.jsonl").write_bytes(b"\n".join([latin, *(line.encode("utf-8") for line in lines)]))
    (tmp_path / "c.txt").write_bytes("Un café au lait, s'il vous plaît. ".encode("latin-1") * 20)
    files, notes = [tmp_path / name for name in ("a.py", "b.jsonl", "c.txt", "gone.md")], list[str]()
    found = list(given_prompts(files, tokenizer, notes.append))
    assert f"8 lines of {files[1]} are left out: they are not JSON in UTF-8 with a `prompt`" in notes[0]
    assert "or they have no user's turn, more than 256 tokens" in notes[0]
    assert ["not UTF-8" in notes[1], "No such file" in notes[2], len(notes)] == [True, True, 3]
    plain = [prompt for prompt in found if prompt.origin == "a.py"]
    chats = [prompt for prompt in found if prompt.origin == "b.jsonl"]
    assert len(plain) > 1
    assert tokenizer.decode(list(plain[0].ids)).startswith("def add(first")
    said = [tokenizer.decode(list(prompt.ids[prompt.lead :])) for prompt in chats]
    assert [text.split("\nassistant")[0] for text in said] == ["Read it.", "Say\u2028so\x85."]
    assert "Yes." in said[0]
    assert "Go." in said[0]
    assert all(list(prompt.ids[: prompt.lead]) == chat_lead(tokenizer) for prompt in chats)
