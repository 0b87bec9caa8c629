"""Traces of requests: valid contents, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.serve.schedule import CHARACTERS_PER_TOKEN, read_trace, stand_in
from specdec.client.prompt import ChatTurn, Fim
from specdec.core.types import SamplingParams
from specdec.errors import ConfigError
from specdec.load.arrivals import BLOCK_TOKENS

LINES: list[dict[str, Any]] = [
    {"offset_s": 3, "prompt": "p", "max_tokens": 5, "stop": ["a"], "prediction": "b", "session": "s", "salt": "t"},
    {
        "offset_s": 1.5,
        "prompt_ids": [5, 0, 7],
        "seed": 9,
        "fixed": True,
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 3,
        "prediction_ids": [8, 9],
    },
    {"offset_s": 0, "messages": [{"role": "user", "content": "hi"}], "name": "n", "was_first_s": 3.25},
    {"offset_s": 2, "prefix": "f", "suffix": "g", "temperature": 0},
]


def test_what_a_trace_may_hold(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n\n".join(map(json.dumps, LINES)))
    chat, ids, gap, text = (timed.ask for timed in read_trace(path, 2.0))
    assert [timed.offset_s for timed in read_trace(path, 2.0)] == [0.0, 0.75, 1.0, 1.5]
    assert (chat.name, chat.chat, chat.max_tokens, chat.sampling, chat.seed) == (
        "n", (ChatTurn("user", "hi"),), 128, None, None,
    )  # fmt: skip
    assert (ids.ids, ids.seed, ids.fixed, ids.prediction) == ((5, 0, 7), 9, True, (8, 9))
    assert ids.sampling == SamplingParams(temperature=1.0, top_p=0.5, top_k=3)
    assert (gap.gap, gap.sampling) == (Fim("f", "g"), SamplingParams(temperature=0.0))
    assert (text.text, text.stop, text.prediction, text.session, text.salt) == ("p", ("a",), "b", "s", "t")


def test_bug_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "p"}\n', encoding="utf-8-sig")
    assert [timed.ask.text for timed in read_trace(path)] == ["p"]


def test_the_example_has_a_long_prompt_that_arrives_while_streams_run() -> None:
    *streams, last = read_trace(Path(__file__).parents[3] / "examples" / "long_prompt.jsonl")
    assert len(streams) == 4
    assert all(timed.ask.fixed and timed.offset_s == 0 for timed in streams)
    assert len({timed.ask.text for timed in streams}) == 4
    assert last.offset_s > 0
    assert len(last.ask.text) > 40 * max(len(timed.ask.text) for timed in streams)


def test_a_misspelt_prompt_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for line, problem in (
        ('{"promt": "x"}', "promt: there is no such field"),
        ("{}", "exactly one of prompt, "),
    ):
        path.write_text(line)
        with pytest.raises(ConfigError, match=f"^trace: t.jsonl, line 1: {problem}"):
            read_trace(path)


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    path, said = tmp_path / "t.jsonl", "a\u2028b\u2029c\x85d"
    path.write_text(json.dumps({"offset_s": 0, "prompt": said}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert [timed.ask.text for timed in read_trace(path)] == [said]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"offset_s": -1}, "offset_s"), ({"offset_s": True}, "offset_s"), ({"prompt_ids": [1]}, "exactly one"),
        ({"prompt": 3}, "prompt: "), ({"max_tokens": 0}, "max_tokens"), ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"), ({"fixed": 1}, "fixed"), ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"), ({"top_k": -1}, "top_k"), ({"stop": ["", "a"]}, "stop"),
        ({"salt": 3}, "salt"), ({"stop": "a"}, "stop"), ({"prefix": "y"}, "exactly one"),
        ({"messages": [{"role": "user", "content": "x"}]}, "exactly one"), ({"messages": "x"}, "messages"),
        ({"max_token": 3}, "max_token: there is no such field"), ({"was_tokens": "x"}, "was_tokens"),
        ({"max_tokens": 1 << 32}, "max_tokens"), ({"seed": 1 << 64}, "seed"), ({"top_k": 1 << 32}, "top_k"),
    ],
)  # fmt: skip
def test_what_it_may_not(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(LINES[0]) + "\n" + json.dumps(LINES[0] | change))
    with pytest.raises(ConfigError, match=f"t.jsonl, line 2: .*{problem}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        ([1], "object"), ({"prompt": "x", "offset_s": None}, "offset_s"), ({"offset_s": 1}, "exactly one"),
        ({"offset_s": 1, "messages": [1]}, "messages"), ({"offset_s": 1, "messages": [{"role": "user"}]}, "messages"),
    ],
)  # fmt: skip
def test_incomplete_requests_are_refused(tmp_path: Path, item: Any, problem: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(LINES[0]) + "\n" + json.dumps(item))
    with pytest.raises(ConfigError, match=f"line 2.*{problem}"):
        read_trace(path)


@pytest.mark.parametrize("data", [b"{", b"\n", b"\xc1"])
def test_bad_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="trace"):
        read_trace(path)
    with pytest.raises(ConfigError, match="trace"):
        read_trace(tmp_path / "missing.jsonl")


@pytest.mark.parametrize("ids", [[], [-1], ["a"], [True], "12", None])
def test_tokens_are_numbers(tmp_path: Path, ids: Any) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"offset_s": 0, "prompt_ids": ids}))
    with pytest.raises(ConfigError, match="prompt_ids"):
        read_trace(path)


def test_stand_ins_are_as_long_and_begin_alike(tmp_path: Path) -> None:
    def one(blocks: list[str], tokens: int, name: str) -> dict[str, Any]:
        return {"offset_s": 0, "prompt_blocks": blocks, "prompt_tokens": tokens, "name": name}

    path = tmp_path / "t.jsonl"
    path.write_text(
        "\n".join(map(json.dumps, [one(["a", "b"], 150, "x"), one(["a", "c"], 140, "y"), one([], 10, "z")]))
    )
    x, y, z = (timed.ask.text for timed in read_trace(path))
    block = int(BLOCK_TOKENS * CHARACTERS_PER_TOKEN)
    assert x[:block] == y[:block]
    assert x[block : 2 * block] != y[block : 2 * block]
    assert [len(text) for text in (x, y, z)] == [525, 490, 35]
    assert stand_in(["a", "b"], 150, "x") == x
    assert stand_in(["a", "b"], 150, "other")[2 * block :] != x[2 * block :]
    assert len(stand_in([], 100_000, "long")) == 350_000
