"""The client against a server in another process's engine, with keys and TLS."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest

from specdec.api.v1 import completion_pb2 as completion
from specdec.api.v1 import options_pb2 as options
from specdec.client.client import Client
from specdec.client.connection import CallError, Credentials, RetryPolicy
from specdec.client.prompt import ChatTurn, CompletionHints, Fim
from specdec.core.types import Delta, Finished, FinishReason, SamplingParams, Started, StoppingParams
from specdec.errors import ConfigError
from tests.fake_engine import DEFAULT_SEED, FLUSHED
from tests.server.auth.certificates import Certificates, write_self_signed
from tests.server.auth.key_files import make_key
from tests.server.fake_tokenizer import BOS
from tests.server.harness import running_server
from tests.server.secure_harness import secure_server


async def test_bug_a_message_to_a_session_that_has_ended_says_why() -> None:
    async with running_server() as server, Client(f"127.0.0.1:{server.addresses.grpc_port}") as client:
        message = completion.CompleteSessionRequest(ask=completion.CompletionAsk(id=1))  # without a setup
        async with client.completion.session() as session:
            await session.send(message)
            with pytest.raises(CallError):
                _ = [answer async for answer in session]
            with pytest.raises(CallError, match="the first message must set up the session") as caught:
                await session.send(message)
            assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
        async with client.completion.session() as session:
            setup = completion.SessionSetup(completion=completion.CompletionOptions(mode="MODE_PREFIX"))
            await session.send(completion.CompleteSessionRequest(setup=setup))
            await session._call.done_writing()
            _ = [answer async for answer in session]
            with pytest.raises(CallError, match="the server has ended the stream"):
                await session.send(message)


async def test_every_call_over_tls_with_a_key(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "tls")
    keys = tmp_path / "keys.yaml"
    key = make_key(keys, "boss", "ops", admin=True)
    who = Credentials(
        key, True, certificates.ca, certificates.client, certificates.client
    )  # trustme writes key and chain into one file
    async with (
        secure_server(
            keys_file=keys, tls_cert=certificates.cert, tls_key=certificates.key, tls_client_ca=certificates.ca
        ) as server,
        Client(server.address, who) as client,
    ):
        answer = await client.generate("hello", request_id="mine", sampling=SamplingParams(n=2))
        assert (answer.request_id, answer.model, answer.seed) == ("mine", "fake", DEFAULT_SEED)
        assert [s.index for s in answer.samples] == [0, 1]
        assert answer.samples[0].token_ids == [BOS, *b"hello"]
        assert answer.text == chr(BOS) + "hello"
        assert answer.samples[1].reason == FinishReason.LENGTH
        events = [event async for event in client.stream([7, 8, 9], stopping=StoppingParams(max_tokens=2))]
        assert [type(e) for e in events] == [Started, Delta, Delta, Finished]
        assert len({e.request_id for e in events}) == 1
        assert (await client.prefill([ChatTurn("user", "hi")])).prompt_tokens == len("user:hi;")
        assert await client.tokenize("a!", add_special=False, parse_special=True) == [ord("a"), 255]
        assert await client.tokenize([ChatTurn("user", "hi")]) == list(b"user:hi;")
        asked = await client.generate([ChatTurn("user", "hi")], template_variables={"enable_thinking": False})
        assert asked.text.startswith("enable_thinking=False;user:hi;")
        assert await client.detokenize([BOS, 104, 105]) == "hi"
        assert await client.detokenize([BOS, 104], skip_special_tokens=False) == chr(BOS) + "h"
        assert (await client.info()).target == "fake"
        assert (await client.load()).total_pages in (0, 64)
        assert len(await client.trace(2)) == 2
        assert not await client.abort("nothing")
        assert await client.admin.flush_cache() == FLUSHED
        assert await client.admin.swap_draft("small", "int4") == ("small-int4", ("suffix", "model"))
        assert await client.admin.swap_draft() == (None, ("suffix",))
        assert await client.admin.drain(0.1) == 0
        with pytest.raises(CallError) as caught:
            await client.generate("x", timeout_s=0.3)
        assert (caught.value.reason, caught.value.retry_after_s) == ("DRAINING", 1.0)


async def test_editor_completion() -> None:
    async with running_server() as server:
        address = f"127.0.0.1:{server.addresses.grpc_port}"
        async with Client(address) as client:
            with pytest.raises(CallError) as caught:
                await anext(client.completion.complete(Fim("a", "b")))
            assert caught.value.reason == "FIM_NOT_SUPPORTED"
            gap, hints = Fim("hello", "b", ""), CompletionHints("prefix", stop_at_suffix=False)
            events = [e async for e in client.completion.complete(gap, hints, request_id="mine")]
            assert isinstance(events[0], Started)
            assert {event.request_id for event in events} == {"mine"}
            assert "".join(e.text for e in events if isinstance(e, Delta)).endswith("hello")
            cut = client.completion.complete(gap, hints, stopping=StoppingParams(max_tokens=2))
            assert sum(isinstance(event, Delta) for event in [e async for e in cut]) == 2
            assert await client.completion.report_outcome("mine", "accepted")
            assert not await client.completion.report_outcome("nobody", "shown")
            async with client.completion.session() as session:
                setup = completion.SessionSetup(completion=completion.CompletionOptions(mode="MODE_PREFIX"))
                ask = completion.CompletionAsk(id=7, fim=options.FimPrompt(prefix="hello", middle_prefix=""))
                await session.send(completion.CompleteSessionRequest(setup=setup, ask=ask))
                await session.done()
                answers = [answer async for answer in session]
            assert answers[0].WhichOneof("event") == "ready"
            assert answers[-1].finished.ask_id == 7
            assert "".join(a.delta.text for a in answers).endswith("hello")
            async with client.completion.session() as session:
                await session.send(completion.CompleteSessionRequest(ask=ask))  # without a setup
                with pytest.raises(CallError):
                    _ = [answer async for answer in session]


async def test_closing_a_stream_ends_the_request() -> None:
    async with secure_server() as server, Client(server.address) as client:
        async with aclosing(client.stream("x" * 100, cache_salt="slow")) as events:
            assert isinstance(await anext(events), Started)
            assert server.client.in_flight == 1
        async with asyncio.timeout(5):
            while server.client.in_flight:
                await asyncio.sleep(0.01)
        later = [event async for event in client.stream("after")]
        assert isinstance(later[-1], Finished)


async def test_bug_closing_the_client_ends_calls_with_an_error_and_cancels_no_task() -> None:
    async with running_server() as server:
        client = Client(f"127.0.0.1:{server.addresses.grpc_port}")

        async def stream() -> None:
            _ = [event async for event in client.stream("x" * 100, cache_salt="slow")]

        async def edit() -> None:
            async with client.completion.session() as session:
                _ = [answer async for answer in session]

        calls = [stream(), client.generate("x" * 100, cache_salt="slow"), edit()]
        running = [asyncio.create_task(call) for call in calls]
        async with asyncio.timeout(5):
            while server.serving.client.in_flight < 2:
                await asyncio.sleep(0.01)
        await client.close()
        for task in running:
            with pytest.raises(CallError, match="CANCELLED: the call was ended by this client"):
                await task
        for later in (client.info(), stream()):
            with pytest.raises(CallError, match="this client is closed"):
                await later


async def test_a_cancelled_task_is_cancelled() -> None:
    async with secure_server() as server, Client(server.address) as client:
        running = asyncio.create_task(client.generate("x" * 100, cache_salt="slow"))
        async with asyncio.timeout(5):
            while not server.client.in_flight:
                await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_deadline_ends_the_call_and_an_abort_keeps_the_partial_output() -> None:
    async with secure_server() as server, Client(server.address) as client:
        with pytest.raises(CallError) as caught:
            await client.generate("x" * 100, cache_salt="slow", timeout_s=0.2)
        assert caught.value.code == grpc.StatusCode.DEADLINE_EXCEEDED
        for longest_s in (float("inf"), 1e10):
            assert (await client.generate("x", stopping=StoppingParams(max_tokens=2), timeout_s=longest_s)).samples
        running = asyncio.create_task(client.generate("x" * 100, cache_salt="slow", request_id="long"))
        async with asyncio.timeout(5):
            while not await client.abort("long"):
                await asyncio.sleep(0.05)
        assert (await running).samples[0].reason == FinishReason.ABORTED


async def test_a_superseded_call_reports_it() -> None:
    async with secure_server() as server, Client(server.address) as client:
        older = asyncio.create_task(client.generate("x" * 100, cache_salt="slow", supersedes_key="doc"))
        async with asyncio.timeout(5):
            while not server.client.in_flight:
                await asyncio.sleep(0.01)
        newer = await client.generate("hello", supersedes_key="doc")
        with pytest.raises(CallError) as caught:
            await older
    assert newer.text == chr(BOS) + "hello"
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.ABORTED, "SUPERSEDED")


async def test_an_address_that_is_a_url_is_refused_with_the_way_out() -> None:
    async with Client("http://127.0.0.1:1", retry=RetryPolicy(attempts=1)) as client:
        with pytest.raises(CallError, match="give host:port, without a scheme"):
            await client.info()


@pytest.mark.parametrize("key", ["sd-k\n", "sd-ключ"])
def test_a_key_that_no_call_can_carry_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="credentials: key has a line break"):
        Credentials(key)


async def test_a_wrong_key_and_an_untrusted_certificate(tmp_path: Path) -> None:
    certificates, other = Certificates(tmp_path / "a"), Certificates(tmp_path / "b")
    keys = tmp_path / "keys.yaml"
    make_key(keys, "a")
    async with secure_server(keys_file=keys, tls_cert=certificates.cert, tls_key=certificates.key) as server:
        async with Client(server.address, Credentials("sd-wrong", True, certificates.ca)) as client:
            with pytest.raises(CallError) as caught:
                await client.info()
            assert caught.value.code == grpc.StatusCode.UNAUTHENTICATED
        once = RetryPolicy(attempts=1)
        for credentials, way_out in (
            (Credentials("sd-k", True, other.ca), r"give its authority's file \(--ca\)"),
            (Credentials("sd-k"), "if it uses TLS, give --tls"),
            (Credentials("sd-k", True, certificates.key), "TLS is impossible with the files given"),
        ):
            async with Client(server.address, credentials, once) as client:
                with pytest.raises(CallError, match=way_out) as caught:
                    await client.info()
                assert not caught.value.reached  # and the key was not sent to it
    old_cert, old_key = write_self_signed(tmp_path / "old", days=-1)
    async with (
        secure_server(tls_cert=old_cert, tls_key=old_key) as server,
        Client(server.address, Credentials("", True, old_cert), once) as client,
    ):
        with pytest.raises(CallError, match="its certificate has expired: renew it"):
            await client.info()
    async with (
        secure_server() as server,
        Client(server.address, Credentials("sd-k", True, certificates.ca), once) as client,
    ):
        with pytest.raises(CallError, match="leave --tls out"):
            await client.info()


async def test_calls_wait_for_a_restart_of_the_engine() -> None:
    patient = RetryPolicy(attempts=9)
    async with secure_server() as server, Client(server.address, retry=patient) as client:
        running = asyncio.create_task(client.generate("x" * 60, cache_salt="slow"))
        async with asyncio.timeout(5):
            while not server.client.in_flight:
                await asyncio.sleep(0.01)
        assert server.client.engine.pid is not None
        os.kill(server.client.engine.pid, signal.SIGKILL)
        assert (await running).text == chr(BOS) + "x" * 60
        assert server.client.engine.restarts == 1


def test_a_client_needs_neither_torch_nor_the_server() -> None:
    script = (
        "import sys, specdec.client\n"
        "print([m for m in ('torch', 'numpy', 'server', 'transformers', 'pydantic', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
