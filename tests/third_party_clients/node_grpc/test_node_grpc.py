"""The services driven from another language: Node.js with @grpc/grpc-js, from the .proto files alone."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import google.rpc
import pytest

from specdec.api.generate import ROOT
from tests.server.auth.certificates import Certificates
from tests.server.auth.key_files import make_key
from tests.server.fake_tokenizer import BOS
from tests.server.secure_harness import SecureServer, secure_server
from tests.third_party_clients.node_packages import fetched

HERE = Path(__file__).parent
GOOGLE = Path(next(iter(google.rpc.__path__))).parents[1]

pytestmark = [
    pytest.mark.node,
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node.js with npm"),
]


@pytest.fixture(scope="module")
def program() -> Path:
    """The folder of drive.js with its packages."""
    return fetched(HERE, "drive.js")


async def drive(program: Path, server: SecureServer, scenario: str, *more: str, host: str = "127.0.0.1") -> Any:
    """Return what the program received."""
    address = server.address.replace("127.0.0.1", host)
    process = await asyncio.create_subprocess_exec(
        "node", str(program / "drive.js"), address, scenario, str(ROOT), str(GOOGLE), *more,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors.decode()
    return json.loads(out)


async def idle(server: SecureServer) -> bool:
    """Whether the engine comes to have nothing left of a call."""
    for _ in range(200):
        if not server.client.in_flight:
            return True
        await asyncio.sleep(0.02)
    return False


def check_stream(found: Any) -> None:
    """The answer to the scenario `stream`."""
    assert found["code"] == "OK"
    started, *deltas = [m for m in found["seen"] if m["event"] != "finished"]
    ends = [m["finished"] for m in found["seen"] if m["event"] == "finished"]
    assert started["event"] == "started"
    assert (started["started"]["request_id"], started["started"]["seed"]) == ("from-node", str(2**64 - 1))
    first = [m["delta"] for m in deltas if m["delta"]["index"] == 0]
    assert [t for d in first for t in d["token_ids"]] == [BOS, *b"hello"]
    assert "".join(d["text"] for d in first) == chr(BOS) + "hello"
    assert {(end["index"], end["finish_reason"]) for end in ends} == {
        (0, "FINISH_REASON_LENGTH"),
        (1, "FINISH_REASON_LENGTH"),
    }
    assert ends[0]["usage"]["output_tokens"] == 6


async def test_streamed_response(program: Path) -> None:
    async with secure_server() as server:
        check_stream(await drive(program, server, "stream"))


async def test_a_bad_request_is_reported_by_field(program: Path) -> None:
    async with secure_server() as server:
        found = await drive(program, server, "bad")
    assert (found["seen"], found["code"]) == ([], "INVALID_ARGUMENT")
    fields = {v["field"] for v in found["details"]["google.rpc.BadRequest"]["field_violations"]}
    assert fields == {"sampling.temperature", "sampling.top_p"}
    assert found["details"]["google.rpc.ErrorInfo"] == {"reason": "INVALID_ARGUMENT", "domain": "specdec"}


async def test_a_cancel_ends_the_request(program: Path) -> None:
    async with secure_server() as server:
        found = await drive(program, server, "cancel")
        assert await idle(server)
    assert (found["code"], len(found["seen"]) < 20) == ("CANCELLED", True)


async def test_a_deadline_ends_the_request(program: Path) -> None:
    async with secure_server() as server:
        found = await drive(program, server, "deadline")
        assert await idle(server)
    assert (found["code"], 0 < len(found["seen"]) < 30) == ("DEADLINE_EXCEEDED", True)


async def test_keys_and_tls(program: Path, tmp_path: Path) -> None:
    certificates, keys = Certificates(tmp_path / "tls"), tmp_path / "keys.yaml"
    key = make_key(keys, "node")
    async with secure_server(keys_file=keys, tls_cert=certificates.cert, tls_key=certificates.key) as server:
        ca = str(certificates.ca)
        check_stream(await drive(program, server, "stream", ca, key, host="localhost"))
        found = await drive(program, server, "stream", ca, host="localhost")
    assert found["code"] == "UNAUTHENTICATED"
    assert found["details"]["google.rpc.ErrorInfo"]["reason"] == "UNAUTHENTICATED"
