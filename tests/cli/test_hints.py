"""Commands that messages tell users to run are valid command lines."""

from __future__ import annotations

import ast
import asyncio
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from server.serving import Addresses
from specdec.cli.main import cli
from specdec.cli.serve import ready_lines
from specdec.config import ServerConfig
from specdec.core.types import EngineInfo
from tests.server.auth.certificates import Certificates, write_self_signed
from tests.server.auth.key_files import make_key
from tests.server.harness import running_server
from tests.test_docs_commands import resolve
from tools.markdown import REPOSITORY

INFO = EngineInfo("m", None, "int8", "native", "bitwise", 64, 64, 64, 1, ("suffix",), (0,), 1, "0", "fp32")
FOLDERS = ("specdec", "server", "draft", "bench", "cluster", "verify_kernels")
COMMANDS = "|".join(cli.list_commands(click.Context(cli)))
# `specdec ...` in backticks; else from the command's name to the end of the clause
HINT = re.compile(rf"`specdec ((?:{COMMANDS})\b[^`]*)`|(?:[:;] |^|\n *)specdec ((?:{COMMANDS})\b[^`;\n]*)")


def texts(file: Path) -> Iterator[str]:
    """Every string of ``file``, with NAME for the expressions of f-strings."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "NAME" for part in node.values)  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def hints(text: str) -> list[str]:
    """The commands in ``text``, without the program's name."""
    return [(quoted or bare).strip() for quoted, bare in HINT.findall(text)]


SOURCES = [file for folder in FOLDERS for file in sorted((REPOSITORY / folder).rglob("*.py"))]
HINTS = sorted({hint for file in SOURCES for text in texts(file) for hint in hints(text)})


def parse(words: list[str], folder: Path) -> None:
    """Parse ``words``, in which a word in capitals, or with a slash, is a file; a final option with a file argument is
    only named. Raises click.UsageError."""
    words = ["FILE" if "/" in word else word for word in words]
    for word in words:
        if word == "FOLDER":
            (folder / word).mkdir(exist_ok=True)
        elif word.isupper():
            (folder / word).write_text("x")
    command, rest = resolve(words)
    if isinstance(command, click.Group):
        assert not rest, words
        return
    try:
        command.make_context(words[0], [*rest])
    except (click.BadOptionUsage, click.MissingParameter):
        if any(not word.startswith("-") for word in rest):  # it is more than named
            raise


def test_hints_are_found() -> None:
    assert len(HINTS) > 10
    assert {"serve", "models fetch NAME", "keys new --admin", "index PATH... --out FILE"} <= set(HINTS)


@pytest.mark.parametrize("hint", HINTS)
def test_commands_in_messages_parse(hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parse(shlex.split(hint.replace("...", "")), tmp_path)


def test_an_invalid_command_would_be_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for wrong in ("models fech NAME", "serve --nothing", "trace show --key-file KEY FILE", "lsp NAME"):
        with pytest.raises((click.UsageError, AssertionError)):
            parse(shlex.split(wrong), tmp_path)


def test_the_command_that_serve_prints_runs_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key's file and the client's certificate alone are the reader's to name."""
    monkeypatch.chdir(tmp_path)
    certificates = Certificates(tmp_path / "tls")
    own_cert, own_key = write_self_signed(tmp_path / "own server")
    keys = tmp_path / "keys.yaml"
    (tmp_path / "KEY").write_text(make_key(keys, "a", "t"))
    for name in ("CERT", "CERT_KEY"):
        (tmp_path / name).write_bytes(certificates.client.read_bytes())
    named_cert, named_key = write_self_signed(tmp_path / "named", address=None)
    named = {"tls_cert": named_cert, "tls_key": named_key}
    mutual = {"tls_cert": own_cert, "tls_key": own_key, "tls_client_ca": certificates.ca}
    for settings in (
        {},
        {"keys_file": keys},
        {"keys_file": keys, "tls_cert": own_cert, "tls_key": own_key},
        named,
        mutual,
    ):

        async def ask(settings: dict[str, Path]) -> str:
            async with running_server(**settings) as server:
                at = Addresses("127.0.0.1", server.addresses.grpc_port, None)
                line = ready_lines(at, INFO, False, ServerConfig(**settings))[-1]
                words = shlex.split(line.partition(" generate ")[2])
                done = await asyncio.to_thread(CliRunner().invoke, cli, ["generate", *words])
                assert done.exit_code == 0, (words, done.output)
                trace = [word for word in words if word != words[-1]]
                shown = await asyncio.to_thread(CliRunner().invoke, cli, ["trace", *trace, "--limit", "1", "--json"])
                assert shown.exit_code == 0, (trace, shown.output)
                return done.stdout

        assert "Once upon a time" in asyncio.run(ask(settings))


@pytest.mark.parametrize(("address", "printed"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_an_address_that_the_certificate_names_is_printed(address: str, printed: str, tmp_path: Path) -> None:
    cert, key = write_self_signed(tmp_path, address=address)
    server = ServerConfig(tls_cert=cert, tls_key=key)
    assert f" {printed}:1 " in ready_lines(Addresses(address, 1, 2), INFO, False, server)[-1]


def test_a_certificate_issued_by_an_authority_is_not_its_own_authority(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    server = ServerConfig(tls_cert=certificates.cert, tls_key=certificates.key)
    assert "--tls " in ready_lines(Addresses("box", 1, 2), INFO, False, server)[-1]
    assert "--ca" not in ready_lines(Addresses("box", 1, 2), INFO, False, server)[-1]
