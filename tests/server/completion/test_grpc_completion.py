"""CompletionService over real sockets, with an engine in a separate process."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo

from server.completion.prompt_packer import PackedPrompt, PromptPacker
from server.grpc.completion_messages import read_options
from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import generation_pb2, options_pb2, result_pb2
from specdec.core.types import ResumeParams
from specdec.errors import ViolationCollector
from tests.fake_engine import BOOK
from tests.server.completion.code_tokenizer import QWEN, CodeTokenizer
from tests.server.completion.editor import AT, LINE, TEXT, Editor, Server, failed, fim, running
from tests.server.harness import rich
from tests.server.observe.metrics.scrape import Scrape


def no_fim() -> CodeTokenizer:
    return CodeTokenizer(("<repo_name>", "<file_sep>"))


async def complete(server: Server, request: pb.CompleteRequest) -> tuple[list[pb.CompleteResponse], str]:
    messages = [message async for message in server.completion.Complete(request)]
    return messages, "".join(message.delta.text for message in messages)


async def test_a_completion_from_start_to_end() -> None:
    async with running() as server:
        request = pb.CompleteRequest(request_id="mine", fim=fim())
        messages, text = await complete(server, request)
        assert text == LINE
        assert [m.WhichOneof("event") for m in messages[:2]] == ["started", "delta"]
        assert (messages[0].started.request_id, messages[0].started.model) == ("mine", "book")
        assert messages[-1].finished.finish_reason == result_pb2.FINISH_REASON_INDENT
        assert messages[0].started.prompt_tokens == len(TEXT.text) + 3 - 1  # the answer spells the blank at the gap
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
        request = generation_pb2.GenerateRequest(
            fim=fim(), sampling={"temperature": 0.0}, stopping=options_pb2.StoppingOptions(max_lines=1)
        )
        response = await server.generation.Generate(request)
        assert response.samples[0].text == LINE


async def test_bug_a_gap_was_encoded_beside_those_of_other_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    owners: list[str] = []
    pack = PromptPacker.pack

    def seen(*gap: Any, **scope: Any) -> PackedPrompt:
        owners.append(scope["owner"])
        return pack(*gap, **scope)

    monkeypatch.setattr(PromptPacker, "pack", seen)
    cache = options_pb2.CacheOptions(salt="mine")
    async with running() as server:
        await server.generation.Prefill(generation_pb2.PrefillRequest(fim=fim(), cache=cache))
        await server.generation.Generate(generation_pb2.GenerateRequest(fim=fim(), cache=cache))
    assert owners == ["mine", "mine"]


async def test_a_model_without_fill_in_the_middle() -> None:
    async with running(no_fim) as server:
        error = await failed(server.completion.Complete(pb.CompleteRequest(fim=fim())))
        assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert rich(error)[ErrorInfo].reason == "FIM_NOT_SUPPORTED"
        for mode in (pb.CompletionOptions.MODE_PREFIX, pb.CompletionOptions.MODE_MIDDLE_OR_PREFIX):
            _, text = await complete(server, pb.CompleteRequest(fim=fim(), completion=pb.CompletionOptions(mode=mode)))
            assert text == LINE
        editor = Editor(server)
        await editor.send(setup=pb.SessionSetup())
        assert (await failed(editor.call)).code() == grpc.StatusCode.FAILED_PRECONDITION
        editor = Editor(server)
        ready = await editor.set_up(completion=pb.CompletionOptions(mode=pb.CompletionOptions.MODE_MIDDLE_OR_PREFIX))
        assert not ready.fills_in
        ask = await editor.ask(ask=pb.CompletionAsk(id=1, fim=fim()))
        assert (await editor.answer(ask))[1] == LINE


async def test_every_bad_field_is_named() -> None:
    async with running() as server:
        request = pb.CompleteRequest(
            completion=pb.CompletionOptions(mode=9, max_prompt_tokens=3, ttft_ms=0),  # type: ignore[arg-type]
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
            "fim", "completion.mode", "completion.max_prompt_tokens", "completion.ttft_ms", "sampling.temperature",
            "stopping.max_lines", "stopping.time_limit_ms", "stopping.suffix", "stopping.lead",
            "stopping.brackets.closers", "stopping.brackets.quote", "prediction",
        }  # fmt: skip
        error = await failed(server.completion.Complete(pb.CompleteRequest(model="other", fim=fim())))
        assert error.code() == grpc.StatusCode.NOT_FOUND


def test_an_interrupted_completion_resumes() -> None:
    """The engine's part is tested in tests/engine/test_resume.py."""
    resume = options_pb2.ResumeOptions(token_ids=[1, 2], text_characters=3, numeric_fingerprint="f")
    options = read_options(pb.CompleteRequest(fim=fim(), resume=resume), violations := ViolationCollector())
    assert not violations.found
    assert options.base.resume == ResumeParams((1, 2), 3, "f")


async def test_concurrent_equal_requests_get_equal_answers() -> None:
    async with running() as server:
        slow = options_pb2.CacheOptions(salt="slow")
        requests = [pb.CompleteRequest(request_id=f"{i}", fim=fim(), cache=slow) for i in range(3)]
        answers = await asyncio.gather(*(complete(server, request) for request in requests))
        assert [text for _, text in answers] == [LINE] * 3
        assert [messages[0].started.request_id for messages, _ in answers] == ["0", "1", "2"]
        assert await server.idle(submitted=3, aborted=0)


async def test_cancelled_completions_leave_nothing_running() -> None:
    async with running() as server:
        slow = options_pb2.CacheOptions(salt="slow")
        call = server.completion.Complete(pb.CompleteRequest(fim=fim(), cache=slow))
        await call.read()
        call.cancel()
        assert await server.idle(submitted=1, aborted=1)
        error = await failed(server.completion.Complete(pb.CompleteRequest(fim=fim(), cache=slow), timeout=0.15))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert await server.idle(submitted=2)  # the engine ended it itself


async def test_outcomes_are_reported() -> None:
    async with running() as server:
        editor = Editor(server)
        await editor.set_up()
        ask = await editor.ask(text=TEXT, offset=AT)
        started, _, _ = await editor.answer(ask)

        def report(**fields: object) -> pb.ReportOutcomeRequest:
            return pb.ReportOutcomeRequest(suggestion_id=started.suggestion_id, **fields)  # type: ignore[arg-type]

        shown = await server.completion.ReportOutcome(report(outcome=pb.OUTCOME_SHOWN))
        assert shown.known
        assert (await server.completion.ReportOutcome(report(outcome=pb.OUTCOME_PARTIALLY_ACCEPTED))).known
        other = report(outcome=pb.OUTCOME_SHOWN)
        other.cache.salt = "other"
        assert not (await server.completion.ReportOutcome(other)).known
        await complete(server, pb.CompleteRequest(request_id="single", fim=fim()))
        single = pb.ReportOutcomeRequest(suggestion_id="single", outcome=pb.OUTCOME_ACCEPTED)
        assert (await server.completion.ReportOutcome(single)).known
        found = Scrape(server.serving.models.exporter.render("")[0].decode())
        assert found.value("specdec_suggestions_total") == 2
        counts = {"shown": 1, "partially_accepted": 1, "accepted": 1, "rejected": 0}  # what was revoked stays counted
        assert found.by_label("specdec_suggestion_outcomes_total", "outcome") == counts
        bad = pb.ReportOutcomeRequest(outcome=9)  # type: ignore[arg-type]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.completion.ReportOutcome(bad)
        assert {v.field for v in rich(caught.value)[BadRequest].field_violations} == {"suggestion_id", "outcome"}


def test_the_book_fits_its_tokenizer() -> None:
    assert BOOK.isascii()
    assert len(QWEN) + 256 < 300


@pytest.mark.parametrize("max_tokens", [1, 5])
async def test_generating_a_gap_makes_as_many_tokens_as_completing_it(max_tokens: int) -> None:
    stopping = options_pb2.StoppingOptions(max_tokens=max_tokens)
    async with running() as server:
        sent = [m async for m in server.completion.Complete(pb.CompleteRequest(fim=fim(), stopping=stopping))]
        made = await server.generation.Generate(generation_pb2.GenerateRequest(fim=fim(), stopping=stopping))
    assert made.samples[0].text == "".join(message.delta.text for message in sent) == LINE[:max_tokens]
