"""The server stops and restarts; standard output stays clean; the process exits as it should."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lsprotocol import types

from server.lsp.session import Notices, SessionLink, Settings
from specdec.client import Client
from specdec.errors import ConfigError
from tests.server.lsp.editor import AUTOMATIC, LSP, editing, running, without

LINE = "total = add(total, value)"


async def test_a_server_that_starts_late_stops_and_restarts() -> None:
    text, (line, character) = without(LINE)
    async with running() as server:
        port = int(server.address.rpartition(":")[2])
    async with editing(f"127.0.0.1:{port}", wait="away") as editor:
        editor.open(text)
        for _ in range(3):
            assert await editor.complete(line, character, AUTOMATIC) == []
        assert len(editor.messages) == 1
        assert "no specdec server answers at" in editor.messages[0]
        async with running(port):
            await editor.until("ready")
            [item] = await editor.complete(line, character)
            assert item.insert_text == LINE
        await editor.until("away")
        assert await editor.complete(line, character) == []
        assert len(editor.messages) == 2
        editor.edit((line, character), (line, character), "tot")
        async with running(port):
            await editor.until("ready")
            [item] = await editor.complete(line, character + 3)  # the new server holds nothing of the text
            assert item.insert_text == LINE[3:]


async def test_bug_an_editor_went_to_no_other_server_than_the_first() -> None:
    text, (line, character) = without(LINE)
    async with running() as server, editing(f"127.0.0.1:1, {server.address}") as editor:
        editor.open(text)
        [item] = await editor.complete(line, character)
        assert item.insert_text == LINE


async def test_bug_a_file_that_was_away_for_a_moment_ended_all_tries_to_connect(tmp_path: Path) -> None:
    """As while a certificate is renewed."""
    ca = tmp_path / "ca.pem"
    ca.write_text("none")
    async with editing("127.0.0.1:1", args=("--tls", "--ca", str(ca)), wait="away") as editor:
        ca.unlink()
        async with asyncio.timeout(20):
            while f"{ca} cannot be read" not in editor.statuses[-1]["message"]:
                editor.changed.clear()
                await editor.changed.wait()
            ca.write_text("none")
            while "no specdec server answers" not in editor.statuses[-1]["message"]:
                editor.changed.clear()
                await editor.changed.wait()


async def test_after_a_lost_stream_documents_are_found_again() -> None:
    text, (line, character) = without(LINE)
    async with running() as server, editing(server.address) as editor:
        editor.open(text)
        assert await editor.complete(line, character)
        pid = server.serving.client.engine.pid
        assert pid is not None
        os.kill(pid, 9)  # the engine; the front end stays, and ends the stream at the next request
        editor.edit((line, character), (line, character), "to")
        async with asyncio.timeout(30):
            while not (items := await editor.complete(line, character + 2)):
                await asyncio.sleep(0.05)
        assert items[0].insert_text == LINE[2:]


async def test_a_setting_that_requires_a_change_is_reported_once() -> None:
    text, (line, character) = without(LINE)
    async with running() as server, editing(server.address, {"model": "another"}, wait="away") as editor:
        editor.open(text)
        for _ in range(2):
            assert await editor.complete(line, character) == []
        assert len(editor.messages) == 1
        assert "NOT_FOUND" in editor.messages[0]
        editor.client.workspace_did_change_configuration(types.DidChangeConfigurationParams({"model": "book"}))
        await editor.until("ready")
        assert await editor.complete(line, character)


def test_unreadable_files_are_reported_on_standard_error(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("two words")
    done = subprocess.run([*LSP, "--key-file", str(key)], input=b"", capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"--key-file" in done.stderr


def test_an_empty_address_is_refused() -> None:
    done = subprocess.run([*LSP, "--server", ""], input=b"", capture_output=True, timeout=60)
    assert b"address: must be host:port" in done.stderr


def message(**fields: object) -> bytes:
    body = json.dumps({"jsonrpc": "2.0", **fields}).encode()
    return b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def messages(data: bytes) -> list[Any]:
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        length = int(head.partition(b"Content-Length: ")[2].splitlines()[0])
        found.append(json.loads(data[:length]))
        data = data[length:]
    return found


def test_a_request_after_the_shutdown_is_refused() -> None:
    sent = message(id=1, method="initialize", params={"capabilities": {}, "processId": None, "rootUri": None})
    sent += message(id=2, method="shutdown") + message(id=3, method="workspace/symbol", params={"query": "a"})
    sent += message(method="initialized", params={}) + message(method="exit")
    done = subprocess.run([*LSP, "--server", "127.0.0.1:1"], input=sent, capture_output=True, timeout=60)
    last = messages(done.stdout)[-1]
    assert (done.returncode, last["id"], last["error"]["code"]) == (0, 3, -32600)


def test_standard_output_has_only_messages_and_exit_codes_are_set() -> None:
    noisy = (
        "import sys, os; from server.lsp import language_server as l; from specdec.cli.main import main\n"
        "made = l.InlineLanguageServer.__init__\n"
        "def init(*a):\n made(*a); print('noise'); os.write(1, b'noise')\n"
        "l.InlineLanguageServer.__init__ = init\n"
        "sys.argv = ['specdec', 'lsp', '--stdio', '--server', '127.0.0.1:1']; main()\n"
    )
    hello = message(id=1, method="initialize", params={"capabilities": {}, "processId": None, "rootUri": None})
    goodbye = message(id=2, method="shutdown") + message(method="exit")
    done = subprocess.run([sys.executable, "-c", noisy], input=hello + goodbye, capture_output=True, timeout=60)
    assert done.returncode == 0
    assert [each.get("id") for each in messages(done.stdout)] == [1, 2]
    # A server whose client vanishes exits as well, and logs it.
    done = subprocess.run([*LSP, "--server", "127.0.0.1:1"], input=hello, capture_output=True, timeout=60)
    assert done.returncode == 1


@pytest.mark.parametrize("turns", range(5))
async def test_bug_a_session_that_is_configured_again_just_before_its_end_ends(turns: int) -> None:
    """The end was lost where it met the new settings, since `asyncio.wait_for` drops such a cancellation."""

    def refuse(_: int) -> Client:
        raise ConfigError("there is no server")

    seen: list[dict[str, str]] = []
    link = SessionLink(refuse, Settings(), Notices(lambda text: None, seen.append))
    link.start()
    async with asyncio.timeout(20):
        while not seen or seen[-1]["state"] != "away":
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        link.configure(Settings(mode="off"))
        for _ in range(turns):  # of the event loop
            await asyncio.sleep(0)
        await link.close()
