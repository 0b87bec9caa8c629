"""The benchmark of next edits: figures by hand, and both APIs of a server whose model knows a text."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench import edits_bench
from bench.edits_bench import CompletionsPeer, EditsBench, PredictEditPeer, time_over
from bench.engine_bench import BenchError
from bench.local_server import LocalServer
from bench.peers.peer import OURS_AUTO, OURS_OFF
from bench.workloads import EDIT_ROADS
from bench.workloads.next_edit import EditPrompts, NextEdit
from server.completion.next_edit import EditPlace
from server.serving import Serving
from specdec.client.client import Client
from specdec.config import EngineConfig
from specdec.load.request import LoadRequest, Record
from tests.bench.peers.peers import Actor, answer
from tests.fake_engine import BOOK, BOOKS
from tests.server.completion.code_tokenizer import CodeTokenizer
from tests.server.harness import make_config, quick_policy

TEXT = "".join(f"line_{i} = {i}\n" for i in range(30))


def edit(name: str, cursor: int = 0, text: str = TEXT) -> NextEdit:
    return NextEdit(name, EditPlace(f"{name}.py", text, cursor), text.replace("line_3 =", "third ="))


class TimedActor(Actor):
    """Reads a prompt in 7 ms, then takes ``ms`` for an answer of 8 tokens."""

    def __init__(self, name: str, calls: list[str], ms: float) -> None:
        super().__init__(name, calls)
        self._ms = ms

    async def ask(self, ask: LoadRequest) -> Record:
        if ask.max_tokens == 1:
            self._calls.append(f"{self._name} reads {ask.name}")
            return answer(1, 7.0, 7.0)
        await super().ask(ask)
        return answer(8, 5.0, self._ms, "same", tokens_per_step=4.0)


def bench(edits: list[NextEdit], roads: tuple[str, ...] = EDIT_ROADS) -> EditsBench:
    return EditsBench(roads, edits, cast(Any, CodeTokenizer()), lambda line: None)


async def test_every_prompt_is_read_before_it_counts_and_forms_take_turns() -> None:
    calls: list[str] = []
    edits = [edit(name) for name in ("warm", "a", "b", "c")]
    peers = [TimedActor(OURS_OFF, calls, 100.0), TimedActor(OURS_AUTO, calls, 25.0)]
    figures = await bench(edits).road(peers, ("sweep", "zeta"))
    asked = [call for call in calls if call.startswith(OURS_AUTO)]
    reads = [f"{OURS_AUTO}{what}{name}" for name in "abc" for what in (" reads ", " ")]
    assert asked == [f"{OURS_AUTO} warm", f"{OURS_AUTO} warm", *reads]
    auto = figures[OURS_AUTO]
    assert (auto["tokens"], auto["tokens_per_step"], auto["same_as_off"]) == (24, 4.0, 3)
    assert (auto["whole_ms"]["p50"], auto["whole_ms"]["n"], auto["read_ms"]["p90"]) == (25.0, 3, 7.0)
    found = time_over({"completions": figures}, ("completions", OURS_AUTO), ("completions", OURS_OFF))
    assert found is not None
    assert found["p50"] == 0.25
    roads = {"llama.cpp": {"llama.cpp ngram-mod": auto}}
    assert time_over(roads, ("llama.cpp", OURS_AUTO), ("llama.cpp", OURS_OFF)) is None


async def test_an_engine_that_fails_ends_the_run() -> None:
    with pytest.raises(BenchError, match="cannot ask"):
        await bench([edit("warm"), edit("a")]).road([Actor(OURS_OFF, [], breaks="ask")], ("",))


async def test_a_server_that_is_gone_ends_the_run_by_its_name() -> None:
    gone = CompletionsPeer(cast(Any, SimpleNamespace(http_port=1)), OURS_OFF)
    with pytest.raises(BenchError, match=f"{OURS_OFF}: ConnectError"):
        await bench([edit("warm"), edit("a")]).road([gone], ("",))


async def test_bug_a_missing_llama_cpp_is_told_before_the_first_road(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    async def road(self: EditsBench, peers: Any, forms: Any) -> dict[str, Any]:
        begun.append(str(forms))
        return {}

    monkeypatch.setattr(EditsBench, "road", road)
    monkeypatch.setattr(edits_bench, "find_model", lambda *_: SimpleNamespace(path=tmp_path / "m.gguf"))
    fakes = {"factory": "tests.fake_engine:echo", "tokenizer": "tests.server.fake_tokenizer:FakeTokenizer"}
    monkeypatch.setattr(edits_bench, "LocalServer", functools.partial(LocalServer, **fakes))
    engine = EngineConfig(target="fake", cache_dir=tmp_path)
    edits = [edit("warm"), edit("a")]
    with pytest.raises(BenchError, match=r"llama\.cpp: not installed; `make peers` installs it; .* with --road"):
        await bench(edits).run(engine, cast(Any, None))
    assert not begun
    await bench(edits, EDIT_ROADS[:2]).run(engine, cast(Any, None))
    assert len(begun) == 2


async def test_both_apis_of_a_server() -> None:
    """The model writes the window with ``numbers`` in place of ``values``."""
    serving = Serving(make_config(http_port=0), lambda _: CodeTokenizer(), factory=BOOKS, policy=quick_policy())
    addresses = await serving.start()
    place = EditPlace("a.py", BOOK, BOOK.index("values"))
    shown = place.shown(place.window)
    right = BOOK.replace(shown, shown.replace("values", "numbers"))
    edits = [NextEdit("warm", place, BOOK), NextEdit("a", place, right)]
    try:
        await serving.wait_ready()
        async with Client(f"127.0.0.1:{addresses.grpc_port}") as client:
            server = cast(Any, SimpleNamespace(http_port=addresses.http_port))
            modes = (OURS_OFF, OURS_AUTO)
            made = bench(edits)
            predicted = await made.road([PredictEditPeer(server, mode, client, edits) for mode in modes], ("",))
            completed = await made.road([CompletionsPeer(server, OURS_AUTO)], ("zeta",))
    finally:
        await serving.stop()
    for arm in (OURS_OFF, OURS_AUTO):
        assert (predicted[arm]["edits_right"], predicted[arm]["lines_right"], predicted[arm]["same_as_off"]) == (
            1,
            1,
            1,
        )
        assert 0 < predicted[arm]["first_edit_ms"]["p50"] < predicted[arm]["whole_ms"]["p50"]
    assert completed[OURS_AUTO]["tokens"] > 100
    assert completed[OURS_AUTO]["lines_right"] is None


def test_prompts_of_a_form_begin_the_answer_as_its_editors_do() -> None:
    prompts = EditPrompts(cast(Any, CodeTokenizer()))
    assert CodeTokenizer().decode(prompts.head(edit("a"), "zeta")) == (
        "<|editable_region_start|>\nline_0 = 0\nline_1 = 1\n"
    )
    assert prompts.head(edit("a"), "sweep") == ()
