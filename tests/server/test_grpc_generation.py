"""GenerationService over real sockets."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import model_pb2, options_pb2, result_pb2
from tests.fake_engine import DEFAULT_SEED, MAX_CONTEXT
from tests.server.fake_tokenizer import BOS
from tests.server.harness import Harness, refused, running_server, stream_request


async def load_shows(server: Harness, aborts: int) -> bool:
    """Whether the engine comes to report so many aborts and nothing running."""
    for _ in range(100):
        load = await server.models.GetLoad(model_pb2.GetLoadRequest())
        if (load.prefix_hit_tokens, load.running_requests) == (aborts, 0):
            return True
        await asyncio.sleep(0.05)
    return False


async def test_stream_in_order_and_complete() -> None:
    async with running_server() as server:
        request = stream_request("hello", request_id="mine")
        request.output.logprobs = 2
        messages = [m async for m in server.generation.GenerateStream(request)]
    assert [m.WhichOneof("event") for m in messages] == ["started"] + ["delta"] * 6 + ["finished"]
    started, finished = messages[0].started, messages[-1].finished
    assert (started.request_id, started.model, started.seed) == ("mine", "fake", DEFAULT_SEED)
    assert (started.prompt_tokens, started.cached_tokens, started.queue_ms) == (6, 3, 0.5)
    deltas = [m.delta for m in messages[1:-1]]
    assert [t for d in deltas for t in d.token_ids] == [BOS, *b"hello"]
    assert "".join(d.text for d in deltas) == chr(BOS) + "hello"
    (row,) = deltas[1].logprobs
    assert (row.token_id, row.logprob, [(t.token_id, t.logprob) for t in row.top]) == (
        ord("h"), -0.5, [(ord("h"), -0.5), (1, -1.25)],
    )  # fmt: skip
    assert finished.finish_reason == result_pb2.FINISH_REASON_LENGTH
    assert finished.WhichOneof("matched_stop") is None
    assert (finished.usage.prompt_tokens, finished.usage.cached_tokens, finished.usage.output_tokens) == (6, 3, 6)
    stats = finished.metrics.speculative_decoding
    assert (stats.num_steps, stats.num_spec_steps, stats.num_draft_tokens) == (5, 3, 6)
    assert (stats.num_accepted_draft_tokens, list(stats.acceptance_histogram)) == (3, [1, 1, 1])
    assert (stats.mean_acceptance_length, stats.draft_acceptance_rate) == (2.0, 0.5)
    parts = {
        n: (d.num_draft_tokens, d.num_accepted_draft_tokens, d.draft_acceptance_rate)
        for n, d in stats.by_drafter.items()
    }
    assert parts == {"suffix": (4, 3, 0.75), "idle": (0, 0, 0.0)}
    t = finished.timings
    assert (t.queue_ms, t.prefill_ms, t.decode_ms, t.draft_ms, t.verify_ms) == (0.5, 1.5, 2.5, 0.25, 0.75)


async def test_unary_equals_stream_for_n_samples() -> None:
    async with running_server() as server:
        request = stream_request("hello", n=3)
        request.sampling.seed = 2**64 - 1
        texts = dict.fromkeys(range(3), "")
        async for message in server.generation.GenerateStream(request):
            texts[message.delta.index] += message.delta.text
        unary = pb.GenerateRequest.FromString(request.SerializeToString())  # the fields' numbers are the same
        response = await server.generation.Generate(unary)
    assert response.seed == 2**64 - 1
    assert [sample.index for sample in response.samples] == [0, 1, 2]
    assert [sample.text for sample in response.samples] == [texts[i] for i in range(3)]
    assert len(set(texts.values())) == 3
    assert all(sample.finish_reason == result_pb2.FINISH_REASON_LENGTH for sample in response.samples)
    assert response.request_id  # made by the server
    assert {sample.metrics.speculative_decoding.num_draft_tokens for sample in response.samples} == {6}


async def test_every_kind_of_prediction() -> None:
    async with running_server() as server:
        for prediction, wanted in (
            (None, (0, 0)),
            (options_pb2.PredictionOptions(text=""), (0, 0)),
            (options_pb2.PredictionOptions(text="abX!"), (2, 2)),  # no begin token, no special tokens
            (options_pb2.PredictionOptions(token_ids=options_pb2.TokenIds(ids=[97, 1])), (1, 1)),
        ):
            prompt = options_pb2.TokenIds(ids=b"abc")
            response = await server.generation.Generate(pb.GenerateRequest(token_ids=prompt, prediction=prediction))
            usage = response.samples[0].usage
            assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == wanted


async def test_every_kind_of_prompt() -> None:
    async with running_server() as server:
        chat = options_pb2.ChatPrompt(messages=[options_pb2.ChatMessage(role="user", content="hi")])
        for request, wanted in (
            (pb.GenerateRequest(text="ab"), [BOS, *b"ab"]),
            (pb.GenerateRequest(token_ids=options_pb2.TokenIds(ids=[7, 8])), [7, 8]),
            (pb.GenerateRequest(chat=chat), list(b"user:hi;")),
        ):
            response = await server.generation.Generate(request)
            assert list(response.samples[0].token_ids) == wanted
        tokens = await server.generation.Tokenize(pb.TokenizeRequest(text="a!"))
        raw = await server.generation.Tokenize(pb.TokenizeRequest(text="a!", add_special=False, parse_special=True))
        talk = await server.generation.Tokenize(pb.TokenizeRequest(chat=chat))
        skipped = await server.generation.Detokenize(pb.DetokenizeRequest(token_ids=[BOS, 104, 105]))
        kept = await server.generation.Detokenize(
            pb.DetokenizeRequest(token_ids=[BOS, 104, 105], skip_special_tokens=False)
        )
    assert list(tokens.token_ids) == [BOS, *b"a!"]
    assert list(raw.token_ids) == [ord("a"), 255]
    assert list(talk.token_ids) == list(b"user:hi;")
    assert (skipped.text, kept.text) == ("hi", chr(BOS) + "hi")


async def test_prefill_generates_no_token() -> None:
    async with running_server() as server:
        response = await server.generation.Prefill(pb.PrefillRequest(text="x" * 40, request_id="p"))
    assert (response.request_id, response.prompt_tokens, response.cached_tokens) == ("p", 41, 3)
    assert response.timings.prefill_ms == 1.5


async def test_a_cancelled_stream_is_aborted_in_the_engine() -> None:
    async with running_server(silent_s=2.0) as server:
        call = server.generation.GenerateStream(stream_request("x" * 100, salt="slow"))
        await anext(aiter(call))
        call.cancel()
        client = server.serving.client
        async with asyncio.timeout(10):
            while client.in_flight:
                await asyncio.sleep(0.01)
        unary = server.generation.Generate(
            pb.GenerateRequest.FromString(stream_request("x" * 100, salt="slow").SerializeToString())
        )
        async with asyncio.timeout(10):
            while not client.in_flight:
                await asyncio.sleep(0.01)
        unary.cancel()
        assert await load_shows(server, 2)
        assert client.in_flight == 0


async def test_abort_by_id_keeps_the_partial_output() -> None:
    async with running_server() as server:
        call = server.generation.GenerateStream(stream_request("x" * 100, salt="slow", request_id="long"))
        first = [await anext(aiter(call)) for _ in range(3)]
        assert (await server.generation.Abort(pb.AbortRequest(request_id="long"))).aborted
        rest = [m async for m in call]
        assert not (await server.generation.Abort(pb.AbortRequest(request_id="long"))).aborted
        assert await call.code() == grpc.StatusCode.OK
    assert first[1].delta.token_ids == [BOS]
    assert rest[-1].finished.finish_reason == result_pb2.FINISH_REASON_ABORTED


async def test_a_deadline_reaches_the_engine() -> None:
    async with running_server(silent_s=2.0) as server:
        call = server.generation.GenerateStream(stream_request("x" * 100, salt="slow"), timeout=0.5)
        first = [await anext(aiter(call)) for _ in range(3)]
        error = await refused(call)
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert first[-1].WhichOneof("event") == "delta"
        async with asyncio.timeout(5):
            while server.serving.client.in_flight:  # the client's clock may ring a moment before the server's
                await asyncio.sleep(0.01)
            while (load := server.serving.client.engine.load).tokens_per_second == 0 or load.running_requests:
                await asyncio.sleep(0.05)
        # The deadline that the engine was given; gRPC writes it in few digits, and rounds it up.
        assert 0.3 < load.tokens_per_second < 0.53
        slow = pb.GenerateRequest(text="x" * 100)
        slow.cache.salt = "slow"
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await server.generation.Generate(slow, timeout=0.2)
        assert unary.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_slow_reader_does_not_block_another_stream() -> None:
    async with running_server(max_message_bytes=1 << 20) as server:
        idle = [server.generation.GenerateStream(stream_request("x" * 120, n=16)) for _ in range(4)]
        for call in idle:
            await anext(aiter(call))  # and never again until the others are through
        for _ in range(5):
            messages = [m async for m in server.generation.GenerateStream(stream_request("hello"))]
            assert messages[-1].WhichOneof("event") == "finished"
        rest = [m async for m in idle[0]]
        assert sum(m.WhichOneof("event") == "finished" for m in rest) == 16


async def test_a_message_over_the_limit_is_rejected_and_one_under_it_is_not() -> None:
    async with running_server(max_message_bytes=1 << 16) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.generation.Generate(pb.GenerateRequest(text="x" * (1 << 17)))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as long:
            await server.generation.Generate(pb.GenerateRequest(text="x" * (1 << 15)))
        assert long.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_model_service_describes_the_served_model() -> None:
    async with running_server() as server:
        info = await server.models.GetServerInfo(model_pb2.GetServerInfoRequest())
        listed = await server.models.ListModels(model_pb2.ListModelsRequest())
        load = await server.models.GetLoad(model_pb2.GetLoadRequest())
    assert (info.target, info.draft, info.dtype, info.kernels) == ("fake", "fake-draft", "int8", "native")
    assert info.numeric_mode == model_pb2.NUMERIC_MODE_BITWISE
    assert (info.max_context, list(info.drafters), list(info.eos_token_ids)) == (MAX_CONTEXT, ["suffix"], [0])
    assert info.engine_restarts == 0
    assert [(m.name, m.role) for m in listed.models] == [
        ("fake", model_pb2.MODEL_ROLE_TARGET),
        ("fake-draft", model_pb2.MODEL_ROLE_DRAFT),
    ]
    assert load.running_requests == 0
