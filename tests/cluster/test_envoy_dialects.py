"""A server behind a real Envoy answers as without it: every HTTP endpoint, the gRPC services, an editor's stream."""

from __future__ import annotations

import asyncio
import re
import ssl
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from specdec.api.v1 import completion_pb2 as pb
from specdec.client.client import Client
from specdec.client.connection import CallError, Credentials
from specdec.client.prompt import Fim
from specdec.core.types import Delta, Finished, StoppingParams
from tests.cluster.envoy_fleet import EnvoyFleet, envoy_fleet
from tests.fake_engine import answer_to
from tests.server.auth.certificates import Certificates

pytestmark = pytest.mark.slow

SAYS = [{"role": "user", "content": "hello"}]
# Queries by path, for endpoints without an entry of their own. Every dialect picks the fields that it supports.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
    "/v1/completions": {"prompt": "hello", "max_tokens": 4, "segments": {"prefix": "a", "suffix": "b"}},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 4},
    "/v1/fim/completions": {"prompt": "a", "suffix": "b", "max_tokens": 4},
    "/tokenize": {"content": "hello", "prompt": "hello"},
    "/detokenize": {"tokens": [104, 105]},
    "/api/show": {"model": "scripted"},
    "/v1/messages/count_tokens": {"model": "scripted", "messages": SAYS},
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 4}},
}
BODY = {"model": "scripted", "prompt": "hello", "messages": SAYS, "max_tokens": 4, "text": "hello", "content": "hello"}
# Values that differ between calls: ids, times and durations, figures of the load.
_VOLATILE = re.compile(
    rb"[0-9a-f]{24,}|[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+(Z|\+[0-9:]+)|[0-9]+\.[0-9]+(e-?[0-9]+)?|[0-9]{4,}"
)
_OWN = {"date", "x-request-id", "x-specdec-release", "transfer-encoding", "connection", "content-length"}


def comparable(answer: httpx.Response) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body, without values that differ each time."""
    headers = {name: value for name, value in answer.headers.items() if name not in _OWN}
    headers.pop("request-id", None)
    return answer.status_code, headers, _VOLATILE.sub(b"#", answer.content)


async def test_every_endpoint_gives_the_same_answer_through_envoy(tmp_path: Path) -> None:
    async with envoy_fleet(tmp_path, ["blue"]) as fleet, httpx.AsyncClient(trust_env=False, timeout=20) as client:
        paths = (await client.get(f"{fleet.direct('r0')}/openapi.json")).json()["paths"]
        statuses: dict[str, int] = {}
        for path, operations in paths.items():
            for method in operations:
                bodies: list[dict[str, Any] | None] = [None]
                if method == "post":
                    body = {**BODY, **BODIES.get(path, {})}
                    bodies = [{**body, "stream": False}, {**body, "stream": True}, {"prompt": 7}]
                for body_sent in bodies:
                    url = path.replace("{name}", "icon.svg").replace("{model}", "scripted")
                    _, *both = [  # the first one finds nothing in the prefix cache
                        await client.request(method, f"{base}{url}", json=body_sent)
                        for base in (fleet.direct("r0"), fleet.direct("r0"), fleet.http)
                    ]
                    if path != "/metrics":
                        assert comparable(both[1]) == comparable(both[0]), (method, path, body_sent)
                    assert both[1].headers["x-specdec-release"] == "blue"
                    statuses.setdefault(f"{method} {path}", both[1].status_code)
        assert len(statuses) > 40
        answered = [name for name, status in statuses.items() if status == 200]
        assert {"post /v1/completions", "post /v1/chat/completions", "post /v1/messages", "post /api/generate"} < set(
            answered
        )
        assert len(answered) > 0.7 * len(statuses), statuses  # the others need a key, or a model for embeddings


async def test_a_stream_is_not_buffered(tmp_path: Path) -> None:
    """A buffer on the way would deliver the whole stream at its end."""
    async with (
        envoy_fleet(tmp_path, ["blue"], "scripted:0:200:64") as fleet,
        httpx.AsyncClient(trust_env=False, timeout=20) as client,
    ):
        clock = asyncio.get_running_loop().time
        body = {"prompt": "hello", "max_tokens": 6, "stream": True}
        async with client.stream("POST", f"{fleet.http}/v1/completions", json=body) as answer:
            arrived = [clock() async for _ in answer.aiter_bytes()]
        assert len(arrived) >= 6
        assert arrived[-1] - arrived[0] > 0.5


async def test_grpc_services_through_envoy(tmp_path: Path) -> None:
    async with envoy_fleet(tmp_path, ["blue"]) as fleet, Client(fleet.grpc) as client:
        assert (await client.info()).target == "scripted"
        text = ""
        async with aclosing(client.stream("hello", stopping=StoppingParams(max_tokens=5))) as events:
            async for event in events:
                text += event.text if isinstance(event, Delta) else ""
        assert text == bytes(answer_to([2, *b"hello"], 5)).decode()
        seen = []
        async with aclosing(client.completion.complete(Fim("a = ", "\nb"))) as events:
            seen = [event async for event in events]
        assert isinstance(seen[-1], Finished)
        with pytest.raises(CallError) as caught:
            async with aclosing(client.stream("hello", stopping=StoppingParams(max_tokens=5), model="other")) as events:
                [event async for event in events]
        assert caught.value.code == grpc.StatusCode.NOT_FOUND  # rich errors come through as they are
        assert caught.value.reason == "MODEL_NOT_FOUND"


async def test_an_editors_stream_is_bidirectional_and_unlimited_in_time(tmp_path: Path) -> None:
    async with envoy_fleet(tmp_path, ["blue", "blue"]) as fleet, Client(fleet.grpc) as client:
        await type_keys(client, fleet, 12)


async def type_keys(client: Client, fleet: EnvoyFleet, keys: int) -> None:
    """A session in which every keystroke is an edit and a request, each answered before the next."""
    async with client.completion.session() as session:
        text = pb.DocumentText(uri="a.py", version=1, text="x = ", language="python")
        await session.send(pb.CompleteSessionRequest(setup=pb.SessionSetup(), text=text))
        messages = aiter(session)
        assert (await anext(messages)).WhichOneof("event") == "ready"
        for key in range(1, keys + 1):
            edit = pb.TextEdit(start=3 + key, end=3 + key, text="7")
            edits = pb.DocumentEdits(uri="a.py", from_version=key, version=key + 1, edits=[edit])
            cursor = pb.Cursor(uri="a.py", version=key + 1, offset=4 + key)
            ask = pb.CompletionAsk(id=key, cursor=cursor)
            await session.send(pb.CompleteSessionRequest(edits=edits, ask=ask))
            while (message := await anext(messages)).WhichOneof("event") != "finished":
                pass
            assert message.finished.ask_id == key


async def test_tls_terminates_at_envoy_and_certificates_and_authorities_are_reloaded(tmp_path: Path) -> None:
    first, second = Certificates(tmp_path / "first"), Certificates(tmp_path / "second")
    cert, key, ca = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"
    first.install(cert, key, ca)
    listen = {"tls_cert": str(cert), "tls_key": str(key), "tls_client_ca": str(ca)}
    async with envoy_fleet(tmp_path, ["blue"], listen=listen) as fleet:
        url = fleet.http.replace("http:", "https:")

        async def admits(server: Certificates, client: Certificates) -> bool:
            context = server.client_context()
            context.load_cert_chain(client.client)
            try:
                async with httpx.AsyncClient(trust_env=False, verify=context) as calls:
                    return (await calls.get(f"{url}/readyz")).status_code == 200
            except (httpx.TransportError, ssl.SSLError):
                return False

        assert await admits(first, first)
        assert not await admits(first, second)
        own = Credentials(tls=True, ca=first.ca, cert=first.client, cert_key=first.client)
        async with Client(fleet.grpc, own) as client:
            assert (await client.info()).target == "scripted"
        for path, new in ((ca, second.ca), (cert, second.cert), (key, second.key)):
            path.with_suffix(".new").write_bytes(new.read_bytes())
            path.with_suffix(".new").replace(path)
        while not await admits(second, second):
            await asyncio.sleep(0.05)
        assert not await admits(second, first)
