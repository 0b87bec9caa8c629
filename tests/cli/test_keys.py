"""`specdec keys new`, and how commands that call a server receive their credentials."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from server.auth.keys import key_hash
from server.serving import Addresses
from specdec.cli.main import cli
from specdec.cli.options import credential_options, pop_credentials
from specdec.cli.runners import RemoteRunner
from specdec.cli.serve import ready_lines
from specdec.client.connection import CallError, Credentials
from specdec.config import ServerConfig
from specdec.core.types import Delta, EngineInfo, Request
from tests.server.auth.certificates import Certificates
from tests.server.auth.key_files import make_key, read_keys
from tests.server.fake_tokenizer import BOS
from tests.server.secure_harness import secure_server

INFO = EngineInfo("m", None, "int8", "native", "bitwise", 64, 64, 64, 1, ("suffix",), (0,), 1, "0", "fp32")


def keys_new(file: Path, *args: str, **kwargs: Any) -> Result:
    return CliRunner().invoke(cli, ["keys", "new", "--file", str(file), *args], **kwargs)


def test_a_key_is_printed_once_and_stored_as_a_hash(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    limits = "--requests-per-minute 60 --tokens-per-minute 1e5 --max-concurrent 4 --max-priority -1"
    done = keys_new(file, "--name", "a", "--tenant", "t", "--admin", *limits.split())
    assert done.exit_code == 0, done.output
    (key,) = done.stdout.split()
    (entry,) = read_keys(file)
    assert entry.hash == key_hash(key)
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    found = entry.limits
    assert (entry.name, entry.tenant, entry.admin) == ("a", "t", True)
    assert (found.requests_per_minute, found.tokens_per_minute, found.max_concurrent, found.max_priority) == (
        60, 1e5, 4, -1,
    )  # fmt: skip
    plain = keys_new(file, "--name", "b", "--tenant", "t")
    assert plain.exit_code == 0
    assert read_keys(file)[1].limits.max_concurrent is None
    assert not read_keys(file)[1].admin


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--name", "a b", "--tenant", "t"], "--name"),
        (["--name", "a", "--tenant", "x/y"], "--tenant"),
        (["--name", "a", "--tenant", "t", "--requests-per-minute", "0"], "--requests-per-minute"),
        (["--name", "a", "--tenant", "t", "--tokens-per-minute", "nan"], "--tokens-per-minute"),
    ],
)
def test_invalid_input_is_named_and_writes_nothing(args: list[str], named: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    done = keys_new(file, *args)
    assert (done.exit_code, file.exists()) == (2, False)
    assert named in done.stderr


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    file = tmp_path / "none" / "keys.yaml"
    done = keys_new(file, "--name", "a", "--tenant", "t")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.strip() == f"Error: {file}: cannot be changed (No such file or directory)"


def test_duplicate_names_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    make_key(file, "a")
    done = keys_new(file, "--name", "a", "--tenant", "t")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "'a' has the name of another" in done.stderr


def credentials_from(*args: str) -> tuple[Result, list[Credentials]]:
    found: list[Credentials] = []

    @click.command()
    @credential_options
    def command(**values: Any) -> None:
        found.append(pop_credentials(values))
        assert not values

    return CliRunner().invoke(command, args), found


def test_credentials_are_read_from_files(tmp_path: Path) -> None:
    key, pem = tmp_path / "key", tmp_path / "pem"
    key.write_text("sd-abc\n")
    pem.write_text("x")
    assert credentials_from()[1] == [Credentials()]
    args = ("--key-file", str(key), "--tls", "--ca", str(pem), "--cert", str(pem), "--cert-key", str(pem))
    assert credentials_from(*args)[1] == [Credentials("sd-abc", True, pem, pem, pem)]
    assert credentials_from("--ca", str(pem))[1] == [Credentials("", True, pem)]  # a URL of https:// needs no --tls
    assert credentials_from("--tls", "--cert", str(pem))[0].exit_code == 2
    for text in ("", "one two", "kéy"):
        key.write_text(text)
        result, _ = credentials_from("--key-file", str(key))
        assert (result.exit_code, "--key-file" in result.stderr) == (2, True)


async def test_a_runner_calls_a_server_that_requires_all_credentials(tmp_path: Path) -> None:
    certificates, keys = Certificates(tmp_path / "tls"), tmp_path / "keys.yaml"
    key = make_key(keys, "a")
    who = Credentials(key, True, certificates.ca, certificates.client, certificates.client)

    def ask(address: str, credentials: Credentials) -> str:
        with RemoteRunner(address, credentials) as runner:
            assert runner.model == "fake"
            events = runner.events("hello", Request("r", ()))
            return "".join(e.text for e in events if isinstance(e, Delta))

    async with secure_server(
        keys_file=keys, tls_cert=certificates.cert, tls_key=certificates.key, tls_client_ca=certificates.ca
    ) as server:
        assert await asyncio.to_thread(ask, server.address, who) == chr(BOS) + "hello"
        with pytest.raises(CallError, match=r"UNAUTHENTICATED: a key is required.*--key-file"):
            await asyncio.to_thread(
                ask, server.address, Credentials("", True, certificates.ca, certificates.client, certificates.client)
            )
        with pytest.raises(CallError, match=r"no specdec server answers.*--tls"):
            await asyncio.to_thread(ask, server.address, Credentials(key))


async def test_a_certificate_of_an_unknown_authority_is_reported_in_one_line(tmp_path: Path) -> None:
    """gRPC would log it too, in a form of its own."""
    certificates = Certificates(tmp_path / "tls")
    words = ["-m", "specdec.cli.main", "generate", "--tls", "--max-tokens", "1", "x", "--server"]
    async with secure_server(tls_cert=certificates.cert, tls_key=certificates.key) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *words, server.address, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        written, said = await process.communicate()
    assert (process.returncode, written) == (1, b"")
    (line,) = said.decode().splitlines()
    assert "give its authority's file (--ca)" in line


def test_the_printed_command_has_the_options_that_the_server_requires() -> None:
    def shown(**server: Any) -> str:
        return "\n".join(ready_lines(Addresses("127.0.0.1", 1, 2), INFO, False, ServerConfig(**server)))

    assert "https" not in shown()
    assert ' --server 127.0.0.1:1 "' in shown()
    secure = shown(tls_cert="c", tls_key="k", keys_file="f")
    assert "https://127.0.0.1:2/" in secure
    assert " --server 127.0.0.1:1 --tls --key-file KEY " in secure


def test_serve_rejects_keys_without_tls_in_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["serve", "--host", "0.0.0.0", "--keys-file", str(tmp_path / "k")])
    assert result.exit_code == 1
    (line,) = [text for text in result.stderr.splitlines() if text.startswith("Error")]
    assert "in the clear" in line
