"""The prompts that go to servers which tokenise themselves, and traces that are replayed."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import msgpack
import pytest

from bench.serve import SERVE_WORKLOADS
from bench.serve.schedule import endless_asks, make_asks, read_trace
from specdec.client.prompt import ChatTurn, Fim
from specdec.errors import ConfigError

GOOD: list[dict[str, Any]] = [
    {"offset_s": 2.0, "prompt": "def f():", "max_tokens": 9, "stop": ["\n\n"], "session": "s", "name": "n"},
    {"offset_s": 0, "messages": [{"role": "user", "content": "hello"}], "prediction": "p"},
    {"offset_s": 1, "prefix": "a = ", "suffix": "\nb"},
]


@pytest.mark.parametrize("name", SERVE_WORKLOADS)
def test_no_prompt_occurs_twice(name: str) -> None:
    first = make_asks(name, 400, 24)
    assert len({(ask.text, ask.chat, ask.gap) for ask in first}) == len(first)
    assert all((bool(a.text), bool(a.chat), a.gap is not None).count(True) == 1 for a in first)
    assert all(1 <= ask.max_tokens <= 24 for ask in first)
    rounds = {ask.name.partition("#")[2] for ask in first}
    assert len({ask.salt for ask in first}) == (1 if name == "shared-prefix" else len(rounds))


def test_shared_prefixes_are_shared_in_every_round() -> None:
    texts = [ask.text for ask in make_asks("shared-prefix", 120)]
    assert len({text[:8000] for text in texts}) == 1
    assert len(set(texts)) == 120


def test_edits_carry_their_prediction_and_typing_goes_on() -> None:
    assert all(ask.prediction in ask.chat[0].content for ask in make_asks("edit", 20))
    gaps = [ask.gap for ask in make_asks("typing", 4)]
    assert all(a and b and b.prefix.startswith(a.prefix) and a.suffix == b.suffix for a, b in pairwise(gaps))


def test_mixed_has_every_kind() -> None:
    kinds = {ask.name.partition("/")[0] for ask in islice(endless_asks("mixed"), 8)}
    assert kinds == {"HumanEval", "edit", "fim", "chat"}


def test_no_such_workload() -> None:
    with pytest.raises(ValueError, match="no such workload"):
        make_asks("nothing", 1)


@pytest.mark.parametrize("kind", ["jsonl", "msgpack"])
def test_a_trace_is_replayed_by_arrival(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"t.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, GOOD)) + "\n\n")
    else:
        path.write_bytes(b"".join(map(msgpack.packb, GOOD)))
    found = read_trace(path, speed=2.0)
    assert [timed.offset_s for timed in found] == [0, 0.5, 1.0]
    chat, gap, text = (timed.ask for timed in found)
    assert chat.chat == (ChatTurn("user", "hello"),)
    assert chat.prediction == "p"
    assert chat.max_tokens == 128
    assert gap.gap == Fim("a = ", "\nb")
    assert (text.text, text.max_tokens, text.stop, text.session, text.name) == ("def f():", 9, ("\n\n",), "s", "n")


@pytest.mark.parametrize(
    ("item", "named"),
    [
        ({"prompt": "x"}, "offset_s"), ({"offset_s": -1, "prompt": "x"}, "offset_s"), ({"offset_s": 1}, "exactly one"),
        ({"offset_s": 1, "prompt": "x", "prefix": "y"}, "exactly one"), ({"offset_s": 1, "prompt": 3}, "prompt"),
        ({"offset_s": 1, "prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"offset_s": 1, "prompt": "x", "stop": "x"}, "stop"), ({"offset_s": 1, "messages": [1]}, "messages"),
        ({"offset_s": 1, "messages": [{"role": "user"}]}, "messages"), ([1], "not an object"),
    ],
)  # fmt: skip
def test_bad_requests_are_named(tmp_path: Path, item: Any, named: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD[0]) + "\n" + json.dumps(item))
    with pytest.raises(ConfigError, match=f"request 2.*{named}"):
        read_trace(path)


@pytest.mark.parametrize(("name", "data"), [("t.jsonl", b"{"), ("t.jsonl", b"\n"), ("t.msgpack", b"\xc1")])
def test_bad_files_are_refused(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match="trace"):
        read_trace(tmp_path / name)
