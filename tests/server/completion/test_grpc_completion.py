"""CompletionService over real sockets, with an engine in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo

from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import generation_pb2, options_pb2, result_pb2
from tests.server.completion.book_engine import BOOK
from tests.server.completion.code_tokenizer import QWEN, CodeTokenizer
from tests.server.completion.editor import Editor, Server, running
from tests.server.harness import rich

AT = BOOK.index("total = add")
BEHIND = BOOK.index("    return total / len")
LINE = "total = add(total, value)"
TEXT = pb.DocumentText(uri="a.py", version=1, text=BOOK[:AT] + "\n" + BOOK[BEHIND:], language="python")


def fim(at: int = AT, behind: int = BEHIND, **fields: object) -> options_pb2.FimPrompt:
    return options_pb2.FimPrompt(prefix=BOOK[:at], suffix="\n" + BOOK[behind:], **fields)  # type: ignore[arg-type]


def no_fim() -> CodeTokenizer:
    return CodeTokenizer(("<repo_name>", "<file_sep>"))


async def complete(server: Server, request: pb.CompleteRequest) -> tuple[list[pb.CompleteResponse], str]:
    messages = [message async for message in server.completion.Complete(request)]
    return messages, "".join(message.delta.text for message in messages)


async def failed(call: grpc.aio.Call) -> grpc.aio.AioRpcError:
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call did not fail")


async def test_a_completion_from_start_to_end() -> None:
    async with running() as server:
        request = pb.CompleteRequest(request_id="mine", fim=fim())
        messages, text = await complete(server, request)
        assert text == LINE
        assert [m.WhichOneof("event") for m in messages[:2]] == ["started", "delta"]
        assert (messages[0].started.request_id, messages[0].started.model) == ("mine", "book")
        assert messages[-1].finished.finish_reason == result_pb2.FINISH_REASON_INDENT
        assert messages[0].started.prompt_tokens == len(TEXT.text) + 3
        named = [
            ({"stopping": options_pb2.StoppingOptions(max_tokens=5)}, "total", result_pb2.FINISH_REASON_LENGTH),
            ({"completion": pb.CompletionOptions(stop_at_dedent=False)}, LINE, result_pb2.FINISH_REASON_SUFFIX),
            (
                {
                    "completion": pb.CompletionOptions(stop_at_suffix=False, stop_at_dedent=False),
                    "stopping": options_pb2.StoppingOptions(max_lines=2),
                },
                LINE + "\n    return total / len(values)",
                result_pb2.FINISH_REASON_LINES,
            ),
        ]
        for fields, expected, reason in named:
            messages, text = await complete(server, pb.CompleteRequest(fim=fim(), **fields))
            assert (text, messages[-1].finished.finish_reason) == (expected, reason)
        assert await server.idle(submitted=4, aborted=0)


async def test_a_prompt_can_be_warmed_and_generated_from() -> None:
    async with running() as server:
        messages, text = await complete(
            server, pb.CompleteRequest(fim=fim(), stopping=options_pb2.StoppingOptions(max_tokens=0))
        )
        assert text == ""
        warm = await server.generation.Prefill(generation_pb2.PrefillRequest(fim=fim()))
        assert warm.prompt_tokens == messages[0].started.prompt_tokens
        request = generation_pb2.GenerateRequest(fim=fim(), stopping=options_pb2.StoppingOptions(max_lines=1))
        response = await server.generation.Generate(request)
        assert response.samples[0].text == LINE


async def test_a_model_that_can_not_fill_in() -> None:
    async with running(no_fim) as server:
        error = await failed(server.completion.Complete(pb.CompleteRequest(fim=fim())))
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED
        assert rich(error)[ErrorInfo].reason == "FIM_NOT_SUPPORTED"
        for mode in (pb.CompletionOptions.MODE_PREFIX, pb.CompletionOptions.MODE_MIDDLE_OR_PREFIX):
            _, text = await complete(server, pb.CompleteRequest(fim=fim(), completion=pb.CompletionOptions(mode=mode)))
            assert text == LINE
        editor = Editor(server)
        await editor.send(setup=pb.SessionSetup())
        assert (await failed(editor.call)).code() == grpc.StatusCode.UNIMPLEMENTED
        editor = Editor(server)
        ready = await editor.set_up(completion=pb.CompletionOptions(mode=pb.CompletionOptions.MODE_MIDDLE_OR_PREFIX))
        assert not ready.fills_in
        ask = await editor.ask(ask=pb.CompletionAsk(id=1, fim=fim()))
        assert (await editor.answer(ask))[1] == LINE


async def test_every_bad_field_is_named() -> None:
    async with running() as server:
        request = pb.CompleteRequest(
            completion=pb.CompletionOptions(mode=9, max_prompt_tokens=3),  # type: ignore[arg-type]
            sampling=options_pb2.SamplingOptions(temperature=-1),
            stopping=options_pb2.StoppingOptions(
                max_lines=0, time_limit_ms=-1, finish_line=True, suffix="x" * 5000, lead="x",
                brackets=options_pb2.BracketOptions(closers="(", quote="?"),
            ),
            prediction=options_pb2.PredictionOptions(),
        )  # fmt: skip
        error = await failed(server.completion.Complete(request))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert {v.field for v in rich(error)[BadRequest].field_violations} == {
            "fim", "completion.mode", "completion.max_prompt_tokens", "sampling.temperature", "stopping.max_lines",
            "stopping.time_limit_ms", "stopping.suffix", "stopping.lead", "stopping.brackets.closers",
            "stopping.brackets.quote", "prediction",
        }  # fmt: skip
        error = await failed(server.completion.Complete(pb.CompleteRequest(model="other", fim=fim())))
        assert error.code() == grpc.StatusCode.NOT_FOUND


async def test_equal_requests_at_once_are_one() -> None:
    async with running() as server:
        slow = options_pb2.CacheOptions(salt="slow")
        requests = [pb.CompleteRequest(request_id=f"{i}", fim=fim(), cache=slow) for i in range(3)]
        answers = await asyncio.gather(*(complete(server, request) for request in requests))
        assert [text for _, text in answers] == [LINE] * 3
        assert [messages[0].started.request_id for messages, _ in answers] == ["0", "1", "2"]
        assert await server.idle(submitted=1, aborted=0)


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


async def test_typing_something_else_ends_it_at_once() -> None:
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


async def test_a_cancelled_ask_ends_and_the_stream_goes_on() -> None:
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


async def test_documents_out_of_step_are_asked_for_again() -> None:
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


async def test_refused_asks_say_why_and_the_stream_goes_on() -> None:
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
async def test_offsets_count_what_the_client_says(unit: pb.OffsetUnit.ValueType, width: int) -> None:
    async with running() as server:
        editor = Editor(server)
        await editor.set_up(unit=unit)
        text = pb.DocumentText(uri="a.py", version=1, text="#😀\n" + TEXT.text)
        ask = await editor.ask(text=text, offset=2 + width + AT)
        assert (await editor.answer(ask))[1] == LINE


async def test_a_stream_that_can_not_be_set_up_ends_with_its_status() -> None:
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
async def test_a_vanished_editor_leaves_nothing_running(when: str) -> None:
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


async def test_cancelled_completions_leave_nothing_running() -> None:
    async with running() as server:
        slow = options_pb2.CacheOptions(salt="slow")
        call = server.completion.Complete(pb.CompleteRequest(fim=fim(), cache=slow))
        await call.read()
        call.cancel()
        assert await server.idle(submitted=1, aborted=1)
        error = await failed(server.completion.Complete(pb.CompleteRequest(fim=fim(), cache=slow), timeout=0.15))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert await server.idle(submitted=2, aborted=2)


async def test_many_asks_at_once_are_all_answered() -> None:
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


async def test_outcomes_are_reported() -> None:
    async with running() as server:
        editor = Editor(server)
        await editor.set_up()
        ask = await editor.ask(text=TEXT, offset=AT)
        started, text, _ = await editor.answer(ask)

        def report(**fields: object) -> pb.ReportOutcomeRequest:
            return pb.ReportOutcomeRequest(suggestion_id=started.suggestion_id, **fields)  # type: ignore[arg-type]

        shown = await server.completion.ReportOutcome(report(outcome=pb.OUTCOME_SHOWN, shown_ms=120))
        assert shown.known
        told = await server.completion.ReportOutcome(
            report(outcome=pb.OUTCOME_PARTIALLY_ACCEPTED, accepted_characters=5, shown_ms=900)
        )
        figures = told.session
        assert (figures.suggested, figures.shown, figures.partially_accepted) == (1, 1, 1)
        assert (figures.shown_characters, figures.accepted_characters, figures.shown_ms) == (len(text), 5, 900)
        other = report(outcome=pb.OUTCOME_SHOWN)
        other.cache.salt = "other"
        assert not (await server.completion.ReportOutcome(other)).known
        await complete(server, pb.CompleteRequest(request_id="single", fim=fim()))
        single = pb.ReportOutcomeRequest(suggestion_id="single", outcome=pb.OUTCOME_ACCEPTED)
        answer = await server.completion.ReportOutcome(single)
        assert (answer.known, answer.HasField("session")) == (True, False)
        bad = pb.ReportOutcomeRequest(outcome=9, shown_ms=-1)  # type: ignore[arg-type]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.completion.ReportOutcome(bad)
        assert {v.field for v in rich(caught.value)[BadRequest].field_violations} == {
            "suggestion_id", "outcome", "shown_ms",
        }  # fmt: skip


async def test_streams_end_when_the_engine_dies_and_when_the_server_drains() -> None:
    async with running() as server:
        editor = Editor(server)
        await editor.set_up(cache=options_pb2.CacheOptions(salt="die"))
        await editor.ask(text=TEXT, offset=AT)
        error = await failed(editor.call)
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        await server.serving.client.wait_ready()
        pid = server.serving.client.pid
        slow = options_pb2.CacheOptions(salt="slow")
        editor = Editor(server)
        await editor.set_up(cache=slow)
        await editor.ask(text=TEXT, offset=AT)
        while (await editor.read()).WhichOneof("event") != "delta":
            pass
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert (await failed(editor.call)).code() == grpc.StatusCode.UNAVAILABLE
        await server.serving.client.wait_ready()
        editor = Editor(server)
        await editor.set_up(cache=slow)
        server.serving._frontend.gate._closed = True
        await editor.ask(text=TEXT, offset=AT)
        assert (await failed(editor.call)).code() == grpc.StatusCode.UNAVAILABLE


def test_the_book_fits_its_tokenizer() -> None:
    assert BOOK.isascii()
    assert len(QWEN) + 256 < 300
