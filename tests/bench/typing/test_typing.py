"""The typing benchmark: figures by hand, and a run with a model that knows the text."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from bench import typing_bench
from bench.engine_bench import BenchError
from bench.typing_bench import (
    PLACES,
    KeysLog,
    Stretch,
    TypingPlan,
    figures_of,
    find_stretch,
    type_in_session,
)
from bench.workloads.workload import source_of
from server.serving import Serving
from specdec.cli.main import cli
from specdec.client.client import Client
from specdec.client.connection import CallError
from tests.fake_engine import BOOK, BOOKS
from tests.server.completion.code_tokenizer import CodeTokenizer
from tests.server.completion.editor import AT, BEHIND, LINE
from tests.server.harness import make_config, quick_policy


def log_of(pressed: list[float], answered: dict[int, float], silent: tuple[int, ...] = ()) -> KeysLog:
    log = KeysLog(pressed)
    for key, at in answered.items():
        log.answer(key, at, text=key not in silent)
    return log


def test_a_key_waits_for_the_next_answer_of_any_later_text() -> None:
    log = log_of([0.0, 1.0, 2.0, 3.0], {0: 0.25, 2: 2.5})
    assert log.waits_ms() == [250, 1500, 500]  # after the last key nothing came any more
    assert log.in_time == 2


def test_a_late_answer_is_not_in_time_but_counts() -> None:
    log = log_of([0.0, 1.0], {0: 1.5, 1: 1.25})
    assert log.waits_ms() == [1250, 250]
    assert log.in_time == 1


def test_news_of_nothing_is_no_text() -> None:
    log = log_of([0.0, 1.0], {0: 0.5, 1: 1.5}, silent=(0,))
    assert log.waits_ms() == [500, 500]
    log.answer(0, 9.0, text=True)
    assert log.answered_s[0] == 0.5
    assert log.with_text == {1}


@given(st.lists(st.tuples(st.booleans(), st.floats(0.001, 5)), min_size=1, max_size=30))
def test_waits_against_their_definition(answers: list[tuple[bool, float]]) -> None:
    pressed = [float(i) for i in range(len(answers))]
    answered = {i: i + delay for i, (there, delay) in enumerate(answers) if there}
    wanted = [
        (min(at for key, at in answered.items() if key >= i) - i) * 1e3
        for i in range(len(answers))
        if any(key >= i for key in answered)
    ]
    assert log_of(pressed, answered).waits_ms() == pytest.approx(wanted)


@pytest.mark.parametrize("place", PLACES)
def test_stretches_are_parts_of_real_files(place: str) -> None:
    found = find_stretch(place, 200)
    assert found.before + found.typed + found.after == source_of(place)
    assert len(found.typed) == 200
    assert not found.typed[0].isspace()
    assert found.before.splitlines()[-1].isspace()  # the cursor stands behind the indentation
    ast.parse(found.before + "pass\n")


def test_a_file_that_is_too_short_is_told() -> None:
    with pytest.raises(BenchError, match=r"colorsys: has no function that is followed by 1000000 characters"):
        find_stretch("colorsys:", 10**6)


BOOK_STRETCH = Stretch("book", BOOK[:AT], LINE[:8], "\n" + BOOK[BEHIND:])


@contextlib.asynccontextmanager
async def book_client() -> AsyncIterator[Client]:
    """A client of a ready server whose model knows `BOOK`."""
    serving = Serving(make_config(), lambda _: CodeTokenizer(), factory=BOOKS, policy=quick_policy())
    addresses = await serving.start()
    try:
        await serving.wait_ready()
        async with Client(f"127.0.0.1:{addresses.grpc_port}") as client:
            yield client
    finally:
        await serving.stop()


async def test_a_refused_ask_ends_the_typing() -> None:
    async with book_client() as client, asyncio.timeout(10):
        with pytest.raises(CallError, match=r"INVALID_ARGUMENT: ask 1 was refused: .*cache\.salt"):
            await type_in_session(client, BOOK_STRETCH, TypingPlan(), "x" * 5000)


async def test_bug_an_answer_that_does_not_come_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typing_bench, "_SETTLE_S", 0.0)
    async with book_client() as client:
        with pytest.raises(BenchError, match="book: no answer to the last key within 0 s"):
            await type_in_session(client, BOOK_STRETCH, TypingPlan(keys_per_s=200.0), "")


async def test_typing_what_the_model_would_say() -> None:
    """Every key is answered in the end, and the session continues earlier suggestions."""
    async with book_client() as client:
        log = await type_in_session(client, BOOK_STRETCH, TypingPlan(keys_per_s=200.0), "")
    assert len(log.pressed_s) == 8
    assert len(log.waits_ms()) == 8
    assert all(wait >= 0 for wait in log.waits_ms())
    assert 7 in log.with_text
    assert log.continued > 0
    figures = figures_of([log])
    assert (figures["keys"], figures["wait_ms"]["n"], figures["prompt_rows_per_key"]) == (8, 8, None)


def test_the_command_prints_a_table_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = figures_of([KeysLog([1.0], {0: 13.3456})]) | {"target": "tiny"}

    async def measure(*_: object) -> dict[str, Any]:
        return figures

    monkeypatch.setattr("bench.typing_bench.measure_typing", measure)
    shown = CliRunner().invoke(cli, ["bench", "typing"])
    assert shown.exit_code == 0, shown.output
    assert "wait_ms" in shown.stdout
    assert "12346" in shown.stdout
    printed = CliRunner().invoke(cli, ["bench", "typing", "--json"])
    assert json.loads(printed.stdout) == figures
