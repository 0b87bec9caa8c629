"""CompleteSession over real sockets: an editor's stream, from its first key to its vanishing."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest

from server.auth.file_watch import FileWatch
from server.completion.documents import TextDocument
from server.served_model import DrainGate
from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import model_pb2, options_pb2, result_pb2
from tests.fake_engine import BOOK
from tests.server.auth.key_files import make_key
from tests.server.completion.editor import AT, LINE, TEXT, Editor, failed, running
from tests.server.completion.scripted_engine import Machine
from tests.server.harness import rich


async def test_typing_through_a_session() -> None:
    async with running() as server:
        editor = Editor(server)
        ready = await editor.set_up(cache=options_pb2.CacheOptions(salt="slow"))
        assert (len(ready.session_id), ready.model, ready.fills_in, dict(ready.documents)) == (32, "book", True, {})
        first = await editor.ask(text=TEXT, offset=AT)
        while (await editor.read()).WhichOneof("event") != "delta":
            pass
        typed, version = 0, 1
        for length in (3, 7, 12):  # "tot", "total =", "total = add("
            edit = pb.TextEdit(start=AT + typed, end=AT + typed, text=LINE[typed:length])
            change = pb.DocumentEdits(uri="a.py", from_version=version, version=version + 1, edits=[edit])
            typed, version = length, version + 1
            ask = await editor.ask(edits=change, offset=AT + typed, version=version)
            while (message := await editor.read()).WhichOneof("event") == "delta":
                assert message.delta.ask_id == ask - 1
            assert message.finished.finish_reason == result_pb2.FINISH_REASON_SUPERSEDED
            assert message.finished.ask_id == ask - 1
            started = await editor.read()
            assert started.started.origin == pb.SuggestionStarted.ORIGIN_CONTINUED
            assert started.started.typed_characters == typed
        text = ""
        while (message := await editor.read()).WhichOneof("event") == "delta":
            text += message.delta.text
        assert (first, text) == (1, LINE[12:])
        assert message.finished.finish_reason == result_pb2.FINISH_REASON_INDENT
        assert message.finished.usage.cached_tokens == 64
        assert await server.idle(submitted=1, aborted=0)
        await editor.call.done_writing()
        assert await editor.call.read() is grpc.aio.EOF
        assert await editor.call.code() == grpc.StatusCode.OK


async def test_a_mismatch_cancels_the_generation_immediately() -> None:
    async with running() as server:
        editor = Editor(server)
        await editor.set_up(cache=options_pb2.CacheOptions(salt="slow"))
        await editor.ask(text=TEXT, offset=AT)
        while (await editor.read()).WhichOneof("event") != "delta":
            pass
        at = BOOK.index("first + second")
        ask = await editor.ask(offset=at)
        while (message := await editor.read()).WhichOneof("event") == "delta":
            pass
        assert message.finished.finish_reason == result_pb2.FINISH_REASON_SUPERSEDED
        started, text, _ = await editor.answer(ask)
        assert started.origin == pb.SuggestionStarted.ORIGIN_NEW
        assert BOOK.startswith(text, at)
        assert await server.idle(submitted=2, aborted=1)


@pytest.mark.parametrize(
    "change",
    [
        {"edits": pb.DocumentEdits(uri="b.py", from_version=5, version=6)},
        {"text": pb.DocumentText(uri="", version=1, text="x")},
        {"cancel": False},  # which clients send that write out every default; it ended the request
    ],
    ids=["out of sync", "invalid", "no cancel"],
)
async def test_a_refused_change_leaves_the_running_request_to_be_superseded(change: dict[str, Any]) -> None:
    async with running() as server:
        editor = Editor(server)
        await editor.set_up(cache=options_pb2.CacheOptions(salt="slow"))
        first = await editor.ask(text=TEXT, offset=AT)
        while (await editor.read()).WhichOneof("event") != "delta":
            pass
        await editor.send(**change)
        second = await editor.ask(offset=BOOK.index("first + second"))
        while (message := await editor.read()).WhichOneof("event") != "finished":
            assert message.WhichOneof("event") in ("delta", "resync", "refused")
        assert message.finished.finish_reason == result_pb2.FINISH_REASON_SUPERSEDED
        assert message.finished.ask_id == first
        assert (await editor.answer(second))[0].ask_id == second


async def test_a_cancelled_request_ends_and_the_stream_continues() -> None:
    async with running() as server:
        editor = Editor(server)
        await editor.set_up(cache=options_pb2.CacheOptions(salt="slow"))
        await editor.ask(text=TEXT, offset=AT)
        while (await editor.read()).WhichOneof("event") != "delta":
            pass
        await editor.send(cancel=True)
        while (message := await editor.read()).WhichOneof("event") == "delta":
            pass
        assert message.finished.finish_reason == result_pb2.FINISH_REASON_ABORTED
        assert await server.idle(submitted=1, aborted=1)
        ask = await editor.ask(offset=AT)
        assert (await editor.answer(ask))[1] == LINE


async def test_documents_out_of_sync_are_requested_again() -> None:
    async with running() as server:
        editor = Editor(server)
        await editor.set_up()
        await editor.ask(offset=AT)
        message = await editor.read()
        assert (message.resync.ask_id, message.resync.uri, message.resync.HasField("version")) == (1, "a.py", False)
        await editor.ask(text=TEXT, offset=AT, version=2)
        message = await editor.read()
        assert (message.resync.ask_id, message.resync.version) == (2, 1)
        lost = pb.DocumentEdits(uri="a.py", from_version=5, version=6)
        await editor.send(edits=lost)
        message = await editor.read()
        assert (message.resync.ask_id, message.resync.version) == (0, 1)
        await editor.ask(edits=lost, offset=AT, version=6)
        assert (await editor.read()).resync.ask_id == 3
        bad = pb.DocumentEdits(uri="a.py", from_version=1, version=2, edits=[pb.TextEdit(start=9, end=8)])
        await editor.ask(edits=bad, offset=AT, version=2)
        refused = (await editor.read()).refused
        assert (refused.ask_id, refused.code, refused.reason) == (4, 3, "INVALID_ARGUMENT")
        assert [problem.field for problem in refused.problems] == ["edits[0]"]
        await editor.ask(offset=10**6)
        assert (await editor.read()).refused.problems[0].field == "ask.cursor.offset"
        await editor.send(close="a.py")
        await editor.ask(offset=AT)
        assert not (await editor.read()).resync.HasField("version")
        await editor.ask(ask=pb.CompletionAsk(id=7))
        assert (await editor.read()).refused.problems[0].field == "ask.place"


async def test_a_rejected_request_reports_why_and_the_stream_continues() -> None:
    async with running() as server:
        editor = Editor(server)
        await editor.set_up(stopping=options_pb2.StoppingOptions(max_lines=0))
        ask = await editor.ask(text=TEXT, offset=AT)
        refused = (await editor.read()).refused
        assert (refused.ask_id, refused.reason) == (ask, "INVALID_ARGUMENT")
        assert [problem.field for problem in refused.problems] == ["stopping.max_lines"]
        await editor.set_up()
        ask = await editor.ask(offset=AT)
        assert (await editor.answer(ask))[1] == LINE


@pytest.mark.parametrize(
    ("unit", "width"), [(pb.OFFSET_UNIT_UTF16, 2), (pb.OFFSET_UNIT_UTF8, 4), (pb.OFFSET_UNIT_CODE_POINT, 1)]
)
async def test_offsets_count_in_the_clients_unit(unit: pb.OffsetUnit.ValueType, width: int) -> None:
    async with running() as server:
        editor = Editor(server)
        await editor.set_up(unit=unit)
        text = pb.DocumentText(uri="a.py", version=1, text="#😀\n" + TEXT.text)
        ask = await editor.ask(text=text, offset=2 + width + AT)
        assert (await editor.answer(ask))[1] == LINE


async def test_a_stream_that_fails_to_open_ends_with_its_status() -> None:
    async with running() as server:
        for message, field in (
            (pb.CompleteSessionRequest(cancel=True), "setup"),
            (pb.CompleteSessionRequest(setup=pb.SessionSetup(unit=9)), "setup.unit"),  # type: ignore[arg-type]
            (
                pb.CompleteSessionRequest(setup=pb.SessionSetup(sampling=options_pb2.SamplingOptions(n=2))),
                "sampling.n",
            ),
        ):
            call = server.completion.CompleteSession()
            await call.write(message)
            error = await failed(call)
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert [v.field for v in rich(error)[BadRequest].field_violations] == [field]
        editor = Editor(server)
        await editor.set_up(session=options_pb2.SessionOptions(id="one"))
        await editor.send(setup=pb.SessionSetup(session=options_pb2.SessionOptions(id="two")))
        assert (await failed(editor.call)).code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("when", ["set up", "asked", "answered", "superseding"])
async def test_a_disconnected_editor_leaves_nothing_running(when: str) -> None:
    async with running() as server:
        editor = Editor(server)
        await editor.set_up(cache=options_pb2.CacheOptions(salt="slow"), session=options_pb2.SessionOptions(id="s"))
        if when != "set up":
            await editor.ask(text=TEXT, offset=AT)
        if when == "answered":
            while (await editor.read()).WhichOneof("event") != "delta":
                pass
        if when == "superseding":
            for at in range(AT, AT + 40):
                await editor.ask(offset=at)
        editor.call.cancel()
        assert await server.idle()
        again = Editor(server)
        ready = await again.set_up(
            cache=options_pb2.CacheOptions(salt="slow"), session=options_pb2.SessionOptions(id="s")
        )
        if when == "answered":
            assert dict(ready.documents) == {"a.py": 1}
            ask = await again.ask(offset=AT)
            assert (await again.answer(ask))[1] == LINE


async def test_many_concurrent_requests_are_all_answered() -> None:
    async with running() as server:
        editor = Editor(server)
        await editor.set_up(cache=options_pb2.CacheOptions(salt="slow"))
        await editor.send(text=TEXT)
        for at in range(AT - 30, AT + 1):
            await editor.ask(offset=at)
        await editor.call.done_writing()
        ends: dict[int, int] = {}
        text = ""
        while (message := await editor.call.read()) is not grpc.aio.EOF:
            if message.WhichOneof("event") == "finished":
                assert message.finished.ask_id not in ends
                ends[message.finished.ask_id] = message.finished.finish_reason
            elif message.WhichOneof("event") == "delta" and message.delta.ask_id == 31:
                text += message.delta.text
        assert list(ends) == list(range(1, 32))
        assert text == LINE
        assert await server.idle()


async def test_streams_end_when_the_engine_crashes_and_when_the_server_drains() -> None:
    async with running() as server:
        editor = Editor(server)
        await editor.set_up(cache=options_pb2.CacheOptions(salt="die"))
        await editor.ask(text=TEXT, offset=AT)
        error = await failed(editor.call)
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        await server.serving.client.engine.wait_ready()
        pid = server.serving.client.engine.pid
        slow = options_pb2.CacheOptions(salt="slow")
        editor = Editor(server)
        await editor.set_up(cache=slow)
        await editor.ask(text=TEXT, offset=AT)
        while (await editor.read()).WhichOneof("event") != "delta":
            pass
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert (await failed(editor.call)).code() == grpc.StatusCode.UNAVAILABLE
        await server.serving.client.engine.wait_ready()
        editor = Editor(server)
        await editor.set_up(cache=slow)
        server.serving.models.first.gate.close()
        await editor.ask(text=TEXT, offset=AT)
        assert (await failed(editor.call)).code() == grpc.StatusCode.UNAVAILABLE


async def test_reading_ahead_suggests_nothing_and_ends_at_the_next_action() -> None:
    async with running() as server:
        editor, cursor = Editor(server), pb.Cursor(uri="a.py", version=1, offset=AT)
        ready = await editor.set_up(completion=pb.CompletionOptions(ttft_ms=400))
        await editor.send(text=TEXT, ask=pb.CompletionAsk(id=50, cursor=cursor, read_ahead=True))
        ended = (await editor.read()).finished
        assert (ended.ask_id, ended.finish_reason) == (50, result_pb2.FINISH_REASON_LENGTH)
        known = server.serving.models.first.maker.time.computed.of("")
        assert max(map(len, known)) > len(TEXT.text)
        assert (await editor.answer(await editor.ask(offset=AT)))[1] == LINE
        await editor.send(setup=pb.SessionSetup(session=options_pb2.SessionOptions(id=ready.session_id)))
        assert (await editor.read()).HasField("ready")
        maker = server.serving.models.first.maker
        maker.time.computed.forget("")
        maker.time.admission = Machine(in_flight=1)  # nothing is read while another request runs
        await editor.send(ask=pb.CompletionAsk(id=51, cursor=cursor, read_ahead=True))
        await editor.send(cancel=True)
        ended = (await editor.read()).finished
        assert (ended.ask_id, ended.finish_reason) == (51, result_pb2.FINISH_REASON_ABORTED)
        assert not maker.time.computed.of("")


async def test_a_drain_waits_for_no_more_prompts_that_are_read_ahead() -> None:
    async with running() as server:
        editor, cursor = Editor(server), pb.Cursor(uri="a.py", version=1, offset=AT)
        await editor.set_up(completion=pb.CompletionOptions(ttft_ms=400))
        model = server.serving.models.first
        model.maker.time.admission = Draining(model.gate)
        await editor.send(text=TEXT, ask=pb.CompletionAsk(id=50, cursor=cursor, read_ahead=True))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await editor.read()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert not model.maker.time.computed.of("")


class Draining:
    """The admission of a server that begins to shut down before the first part is read."""

    def __init__(self, gate: DrainGate) -> None:
        self._gate = gate

    def forecast_s(self, tokens: float) -> float:
        return 0.0

    @property
    def in_flight(self) -> int:
        self._gate.close()
        return 0


async def test_what_is_taken_back_brings_back_the_whole_suggestion() -> None:
    """A loop's body is suggested without the line after it, which the shorter text's suggestion has."""
    before = BOOK[: BOOK.index("for value in values:")]
    async with running() as server:
        editor = Editor(server)
        await editor.set_up()
        for typed in ("", "for value in values:\n        ", "", "for value in values:\n    ", "f"):
            gap = options_pb2.FimPrompt(prefix=before + typed)
            asked = await editor.ask(ask=pb.CompletionAsk(id=editor.asks + 1, fim=gap))
            _, text, _ = await editor.answer(asked)
            fresh = [m async for m in server.completion.Complete(pb.CompleteRequest(fim=gap))]
            assert text == "".join(message.delta.text for message in fresh), typed


async def test_a_session_follows_the_changes_of_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileWatch.__init__, "__defaults__", (0.0, time.monotonic))  # sees every change
    path = tmp_path / "keys.yaml"
    make_key(path, "other")
    without = path.read_text()
    key = make_key(path, "mine")
    limited = path.read_text().replace("name: mine\n", "name: mine\n  limits: {requests_per_minute: 0.01}\n")
    async with running(keys_file=path) as server:
        editor = Editor(server, key)
        await editor.set_up()

        async def ask(version: int) -> int:
            """Of a text that no former suggestion goes on with."""
            text = pb.DocumentText(uri="a.py", version=version, text=f"{TEXT.text}# {version}\n")
            return await editor.ask(text=text, offset=AT, version=version)

        await editor.answer(await ask(1))
        path.write_text(limited)
        await editor.answer(await ask(2))
        await ask(3)
        assert (await editor.read()).refused.reason == "RATE_LIMITED"
        path.write_text(without)
        await ask(4)
        assert (await failed(editor.call)).code() == grpc.StatusCode.UNAUTHENTICATED


async def test_many_edits_of_a_document_hold_up_no_other_call(monkeypatch: pytest.MonkeyPatch) -> None:
    apply, begun, go_on = TextDocument.apply, threading.Event(), threading.Event()

    def apply_slowly(*args: Any) -> None:
        begun.set()
        assert go_on.wait(10)
        apply(*args)

    monkeypatch.setattr(TextDocument, "apply", apply_slowly)
    edits = [pb.TextEdit(start=AT, end=AT, text=" ")] * 1000
    async with running() as server:
        editor = Editor(server)
        await editor.set_up()
        await editor.send(text=TEXT)
        await editor.send(edits=pb.DocumentEdits(uri="a.py", from_version=1, version=2, edits=edits))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        await server.models.GetLoad(model_pb2.GetLoadRequest())
        go_on.set()
        await editor.ask(offset=AT, version=2)
        assert (await editor.read()).WhichOneof("event") == "started"
