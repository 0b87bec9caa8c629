"""The command line as a whole."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

import specdec
from server import serving
from server.serving import Addresses
from specdec.cli.main import cli
from specdec.cli.options import engine_named, engine_options, read_server
from specdec.cli.serve import model_lines, ready_lines
from specdec.config import Config, EngineConfig
from specdec.core.types import EngineInfo
from specdec.errors import ModelError
from tests.test_docs_commands import resolve

INFO = EngineInfo("m", None, "int8", "native", "bitwise", 64, 64, 64, 1, ("suffix",), (0,), 1, "0", "fp32")


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    script = (
        "import sys; from specdec.cli.main import main\n"
        "sys.argv = ['specdec', '--help']\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "print([m for m in ('torch', 'grpc', 'transformers', 'rich', 'specdec.engine') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for name in ("serve", "generate", "trace", "models", "verify", "bench", "doctor"):
        assert f"\n  {name}" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "command", ["serve", "generate", "chat", "status", "trace", "models", "verify", "bench", "doctor"]
)
def test_every_command_can_be_loaded(command: str) -> None:
    result = CliRunner().invoke(cli, [command, "--help"])
    assert (result.exit_code, "Usage:" in result.stdout) == (0, True), result.output


def test_bug_a_table_of_memory_was_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ModelError("memory: 2.00 GiB too little. Needed:\n  weights  3.00 GiB\n  cache    1.00 GiB")

    monkeypatch.setattr(serving, "Serving", refuse)
    done = CliRunner().invoke(cli, ["serve"])
    assert (done.exit_code, done.stderr.splitlines()[-2:]) == (1, ["  weights  3.00 GiB", "  cache    1.00 GiB"])


@pytest.mark.parametrize(
    ("command", "option", "value"), [("train-head --out x", "--hours", "nan"), ("bench step", "--repeats", "0")]
)
def test_bug_numbers_with_which_a_command_cannot_end_well_are_refused(command: str, option: str, value: str) -> None:
    """A training of `nan` hours never ended, and there is no median of no repeat."""
    done = CliRunner().invoke(cli, [*command.split(), "--target", "nowhere", option, value])
    assert (done.exit_code, f"Invalid value for '{option}'" in done.stderr) == (2, True), done.output


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "ab run", "plan", "doctor"])
def test_help_fits_a_screen_and_help_all_has_every_option(command: str) -> None:
    short = CliRunner().invoke(cli, [*command.split(), "--help"], terminal_width=80)
    whole = CliRunner().invoke(cli, [*command.split(), "--help-all"], terminal_width=80)
    assert (short.exit_code, whole.exit_code) == (0, 0)
    assert len(short.stdout.splitlines()) <= 45
    assert "4294967295" not in whole.stdout
    found, rest = resolve(command.split())
    assert not rest
    flags = [parameter.opts[0] for parameter in found.params if isinstance(parameter, click.Option)]
    listed = re.findall(r"^  (--[a-z-]+)", whole.stdout, re.MULTILINE)
    assert sorted(listed) == sorted(flag for flag in flags if flag != "--help-all")


@pytest.mark.parametrize("option", ["--help", "--help-all"])
def test_help_of_a_command_without_its_group(option: str) -> None:
    assert CliRunner().invoke(resolve(["chat"])[0], [option]).exit_code == 0


@pytest.mark.parametrize("group", ["ab", "bench", "cluster", "keys", "models", "plan", "trace"])
def test_bug_a_group_lists_its_commands_with_whole_sentences(group: str) -> None:
    listed = CliRunner().invoke(cli, [group, "--help"], terminal_width=80).stdout
    assert "Commands:" in listed
    assert "..." not in listed.partition("Commands:")[2]


@pytest.mark.parametrize("option", ["--pairs", "--max-tokens"])
def test_verify_refuses_to_compare_nothing(option: str) -> None:
    result = CliRunner().invoke(cli, ["verify", option, "0"])
    assert (result.exit_code, f"{option}': 0 is not in the range x>=1" in result.stderr) == (2, True), result.output


def test_an_options_help_is_its_settings_description() -> None:
    help_text = " ".join(CliRunner().invoke(cli, ["serve", "--help-all"]).stdout.split())
    description = EngineConfig.model_fields["dtype"].description
    assert description is not None
    assert description[1:] in help_text
    assert "--drain SECONDS How long" in help_text  # the unit, which the field's name has


@pytest.mark.parametrize("command", ["serve", "generate", "verify"])
def test_bug_the_help_names_no_value_that_an_option_refuses(command: str) -> None:
    words = "--help" if command == "verify" else "--help-all"
    assert "null" not in CliRunner().invoke(cli, [command, words]).stdout


def test_bug_a_cache_folder_of_a_user_who_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["models", "list", "--cache-dir", "~nobody-by-this-name/x", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)[0]["name"] == "smollm2-135m"


def test_version_and_unknown_command() -> None:
    assert specdec.__version__ in CliRunner().invoke(cli, ["--version"]).stdout
    for word, said in (("nothing", "'nothing'."), ("generat", "'generat'. Did you mean 'generate'?")):
        result = CliRunner().invoke(cli, [word])
        assert result.exit_code == 2
        assert result.stderr.endswith(f"Error: No such command {said}\n")


def test_a_full_disk_is_reported_in_one_line() -> None:
    words = [sys.executable, "-m", "specdec.cli.main", "models", "list"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "Error: [Errno 28] No space left on device\n")


def test_serve_rejects_a_port_in_use_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(cli, ["serve", "--grpc-port", port, "--http-port", "0"])
    assert result.exit_code == 1
    (line,) = [text for text in result.stderr.splitlines() if text.startswith("Error")]
    assert port in line
    assert "in use; choose another with --grpc-port" in line
    assert len(result.stderr.splitlines()) == 2  # no log line of gRPC's library


@pytest.mark.parametrize("words", [["serve", "m"], ["serve", "--model", "m"], ["serve", "--target", "m"], ["serve"]])
def test_serve_accepts_the_model_in_every_position(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[Config] = []
    monkeypatch.setattr(serving, "Serving", lambda config, *_, **__: configs.append(config) or _Stopped())
    result = CliRunner().invoke(cli, [*words, "--port", "9", "--quiet"])
    assert result.exit_code == 0, result.output
    assert configs[0].server.http_port == 9
    assert configs[0].engine.target == ("m" if len(words) > 1 else EngineConfig().target)
    assert ("`specdec serve MODEL`" in result.stderr) == (len(words) == 1)


class _Ready:
    """A server that ends as soon as it is ready."""

    models = (SimpleNamespace(name="m", info=INFO, can=lambda task: True),)

    async def run(self, on_ready: Callable[[Addresses, object], None]) -> None:
        """Ready."""
        on_ready(Addresses("box", 1, 2), INFO)


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_bug_with_json_logs_serve_prints_json_alone(quiet: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "Serving", lambda *_, **__: _Ready())
    result = CliRunner().invoke(cli, ["serve", "m", "--log-format", "json", *quiet])
    lines = [json.loads(line) for line in result.output.splitlines()]
    said = [line["message"] for line in lines if line["logger"] == "specdec.cli.serve"]
    assert (said[0], said[-1]) == ("loading m ...", "stopped")
    assert said[1:-1] == [line.strip() for line in ready_lines(Addresses("box", 1, 2), INFO, True)]
    usual = CliRunner().invoke(cli, ["serve", "m"])
    assert usual.stdout.splitlines() == ready_lines(Addresses("box", 1, 2), INFO, True)


class _Stopped:
    """A server that ends immediately."""

    async def run(self, _: object) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("words", "least"),
    [([], 1), (["--kv-disk-bytes", "5"], 5), (["--keys-file", "k"], 0), (["--kv-disk-bytes", "0"], 0)],
)
def test_the_prefix_cache_goes_to_disk_for_a_server_of_one_user(
    words: list[str], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[Config] = []
    monkeypatch.setattr(serving, "Serving", lambda config, *_, **__: configs.append(config) or _Stopped())
    assert CliRunner().invoke(cli, ["serve", "--quiet", *words]).exit_code == 0
    found = configs[0].engine.kv_disk_bytes
    assert found == least if words else least <= found <= 4 << 30


@pytest.mark.parametrize("words", [["serve", "a", "--target", "b"], ["serve", "--port", "1", "--http-port", "2"]])
def test_two_spellings_of_an_option_are_rejected(words: list[str]) -> None:
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2
    assert "mean the same: give one of them" in result.stderr


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("http://127.0.0.1:8400/", "127.0.0.1:8400"), ("grpc://box:1", "box:1"), ("box", "box:8400"),
        ("a:1, http://b:2", "a:1,b:2"), ("[::1]:5", "[::1]:5"), ("[::1]", "[::1]:8400"),
        ("::1", "[::1]:8400"), ("http://fe80::2/,a", "[fe80::2]:8400,a:8400"),
    ],
)  # fmt: skip
def test_server_addresses_parse_in_every_usual_form(given: str, read: str) -> None:
    assert read_server(click.Context(cli), click.Option(["--server"]), given) == read


def test_a_port_beyond_the_last_is_not_dialled_as_another() -> None:
    for given in ("localhost:84001", "a:1,[::1]:65536,b:2"):
        done = CliRunner().invoke(cli, ["status", "--server", given])
        assert done.exit_code == 2
        assert "is no port; the last is 65535" in done.stderr


def test_a_model_is_the_target_without_engines() -> None:
    assert engine_named(Config(), "m").target == "m"
    assert engine_named(Config(engine=EngineConfig(target="m")), "m").target == "m"
    with pytest.raises(click.UsageError, match="the target is already m"):
        engine_named(Config(engine=EngineConfig(target="m")), "other")


@pytest.mark.parametrize("words", [["serve", "m"], ["generate", "x", "--target", "m"]])
def test_a_target_besides_engines_is_refused(words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("engines: {a: {target: x}}")
    result = CliRunner().invoke(cli, [*words, "--config", str(file)])
    assert result.exit_code == 2
    assert "change engines.NAME.target there" in result.stderr


def test_an_https_address_names_the_option_for_it() -> None:
    result = CliRunner().invoke(cli, ["status", "--server", "https://box:1"])
    assert result.exit_code == 2
    assert "give HOST:PORT without a scheme, and --tls" in result.stderr


def test_serve_reads_its_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "specdec.yaml"
    file.write_text("server: {grpc_port: 70000}\nengine: {kv_tokens: 1, nonsense: 2}\n")
    result = CliRunner().invoke(cli, ["serve", "--config", str(file)])
    assert result.exit_code == 1
    for name in ("server.grpc_port", "engine.kv_tokens", "engine.nonsense"):
        assert name in result.stderr


def test_engine_options_reach_the_configuration(tmp_path: Path) -> None:
    found: list[EngineConfig] = []

    @click.command()
    @engine_options
    def command(engine_config: EngineConfig) -> None:
        found.append(engine_config)

    flags = f"--draft d --draft-head h --trace-file {tmp_path}/trace --no-speculation --drafter grammar,suffix"
    for args in (flags.split(), []):
        result = CliRunner().invoke(command, args)
        assert result.exit_code == 0, result.output
    given, plain = found
    assert (given.draft, given.draft_head) == ("d", "h")
    speculation = given.speculation
    assert (speculation.enabled, speculation.trace_file) == (False, tmp_path / "trace")
    assert speculation.drafters == ("grammar", "suffix")
    assert plain == EngineConfig()


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("box", "box")]
)
def test_ready_lines_have_addresses_and_a_command_to_paste(
    host: str, shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "bin" / "specdec"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(script), "serve"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.defpath)
    assert shutil.which("specdec") is None
    chat = ready_lines(Addresses(host, 8400, 8401), INFO, True)
    assert chat[0].startswith("ready: m, int8, native kernels, bitwise")
    assert f"http://{shown}:8401/v1 " in "\n".join(chat)
    assert f' {script} generate --server {shown}:8400 --chat "' in chat[-1]  # a service's folder is not its reader's
    monkeypatch.setenv("PATH", str(script.parent))
    plain = ready_lines(Addresses(host, 8400, None), INFO, False)
    assert f' specdec generate --server {shown}:8400 "' in plain[-1]
    assert not any("HTTP" in line for line in plain)


def test_ready_lines_name_the_memory_that_weights_are_in() -> None:
    info = dataclasses.replace(INFO, memory_bytes=3 << 29, weight_bytes=1 << 30)
    (here,) = [line for line in ready_lines(Addresses("box", 1, None), info, False) if "uses" in line]
    assert "1.5 GiB of memory, 1.0 of it weights;" in here
    on_gpu = dataclasses.replace(info, kernels="triton", weight_bytes=15 << 30)
    (there,) = [line for line in ready_lines(Addresses("box", 1, None), on_gpu, False) if "uses" in line]
    assert "1.5 GiB of memory, 15.0 GiB of weights on the GPU;" in there


def test_bug_every_one_of_several_models_shows_its_memory() -> None:
    one, two = (dataclasses.replace(INFO, memory_bytes=size << 30) for size in (1, 3))
    shown = [re.findall(r"(\w+): .* (\d+\.\d) GiB of memory", line) for line in model_lines({"chat": one, "fim": two})]
    assert shown == [[("chat", "1.0")], [("fim", "3.0")]]
    assert model_lines({"chat": one}) == []
    at = Addresses("box", 1, None)
    assert "uses" not in "".join(ready_lines(at, one, False, several=True))  # each model's line says it


def test_bug_closed_standard_streams_are_dev_null() -> None:
    words = [sys.executable, "-m", "specdec.cli.main", "generate", "--server", "127.0.0.1:1"]
    closed = ["sh", "-c", 'exec "$0" "$@" <&- >&-', *words]
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.partition(";")[0]) == (1, "Error: no specdec server answers at 127.0.0.1:1")
