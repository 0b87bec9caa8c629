"""Commands in README, quickstart and examples run as shown, each in its own process, against a real server of a tiny
random model."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.markdown import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
TARGET = "random:tiny"
FAST = "engine: {threads: 1, kv_tokens: 4096, speculation: {profile_s: 0}}\n"
CURL = shutil.which("curl")
Run = Callable[..., str]


@dataclass(frozen=True)
class Real:
    """The addresses of a running `specdec serve`."""

    grpc: str
    http: str


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    """A server of random weights, which needs no download; its costs are guessed, which saves the time to measure."""
    config = tmp_path_factory.mktemp("serve") / "specdec.yaml"
    config.write_text(FAST)
    command = [sys.executable, "-m", "specdec.cli.main", "serve", "--config", str(config), "--target", TARGET]
    command += ["--quiet", "--grpc-port", "0", "--http-port", "0", "--kv-disk-bytes", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            output = "".join(process.stdout.readline() for _ in range(3))
            yield Real(re.findall(r"gRPC +(\S+)", output)[0], re.findall(r"HTTP +(http://[^/]+)", output)[0])
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run an example as `python examples/NAME ARGUMENTS` does, outside the checkout; returns its output."""

    def running(name: str, *arguments: str) -> str:
        command = [sys.executable, str(EXAMPLES / name), *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise SystemExit(done.stderr)
        return done.stdout

    return running


def figure(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, text
    return int(found.group(1))


@pytest.mark.parametrize("mode", ["on", "off"])  # the shown command has none: auto
def test_grpc_stream(mode: str, real: Real, run: Run) -> None:
    output = run("grpc_stream.py", "--server", real.grpc, "--speculation", mode, "--max-tokens", "40", "aaaa aaaa aaaa")
    assert figure(r"\[(\d+) tokens of prompt", output) > 20
    tokens, steps = figure(r"\[(\d+) tokens in", output), figure(r"\[(\d+) steps", output)
    accepted, drafted = figure(r"\[(\d+) of \d+ draft", output), figure(r"\[\d+ of (\d+) draft", output)
    assert 0 < steps <= tokens <= 40
    assert accepted <= drafted
    assert (drafted > 0) == (mode == "on")


def test_the_stream_reports_errors(real: Real, run: Run) -> None:
    with pytest.raises(SystemExit, match=r"INVALID_ARGUMENT.*CONTEXT|prompt"):
        run("grpc_stream.py", "--server", real.grpc, "x" * 5000)


@pytest.mark.parametrize(
    ("name", "server", "message"),
    [
        ("grpc_stream.py", "127.0.0.1:1", "no specdec server answers at 127.0.0.1:1"),
        ("grammar.py", "127.0.0.1:1", "no specdec server answers at 127.0.0.1:1"),
        ("compare_off_auto.py", "127.0.0.1:1", "no specdec server answers at 127.0.0.1:1"),
        ("openai_prediction.py", "http://127.0.0.1:1", "http://127.0.0.1:1: Connection error."),
    ],
)
def test_bug_without_a_server_an_example_says_so_in_one_line(
    name: str, server: str, message: str, run: Run, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("text\n")
    arguments = {"grammar.py": [], "openai_prediction.py": [str(text), "change it"]}.get(name, [str(text)])
    with pytest.raises(SystemExit) as ended:
        run(name, "--server", server, *arguments)
    line, *more = str(ended.value).splitlines()
    assert line.startswith(message)
    assert not more


@pytest.mark.parametrize("words", [("openai_prediction.py", "change it"), ("compare_off_auto.py",)])
def test_bug_a_file_that_cannot_be_read_is_named_in_one_line(words: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    binary = tmp_path / "binary.py"
    binary.write_bytes(b"\xff")
    for path, reason in ((tmp_path / "gone.py", "No such file"), (binary, "can't decode")):
        with pytest.raises(SystemExit) as ended:
            run(words[0], str(path), *words[1:])
        (line,) = str(ended.value).splitlines()
        assert str(path) in line
        assert reason in line


def test_openai_prediction(real: Real, run: Run, tmp_path: Path) -> None:
    old = tmp_path / "old.py"
    old.write_text("def add(a, b):\n    return a + b\n")
    output = run("openai_prediction.py", "--server", real.http, "--max-tokens", "24", str(old), "Rename add to plus.")
    assert 0 < figure(r"\[(\d+) steps\]", output) <= figure(r"\[(\d+) tokens\]", output) <= 24
    came, rest = figure(r"prediction: (\d+) came", output), figure(r"came out, (\d+) did not", output)
    assert came + rest == len(old.read_bytes())  # the model's tokens are bytes


@pytest.mark.skipif(CURL is None, reason="this machine has no curl")
def test_fim(real: Real) -> None:
    command = ["sh", str(EXAMPLES / "fim.sh"), real.http]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    llamacpp, openai = (json.loads(line) for line in done.stdout.splitlines())
    assert list(llamacpp) == ["content", "stop_type", "timings/draft_n", "timings/draft_n_accepted"]
    assert openai["choices"][0]["finish_reason"] in ("stop", "length")
    assert 0 <= llamacpp["timings/draft_n_accepted"] <= llamacpp["timings/draft_n"]
    for text in (llamacpp["content"], openai["choices"][0]["text"]):
        assert text
        assert "\n" not in text


def test_grammar(real: Real, run: Run) -> None:
    choice, regex, schema, *cut = run("grammar.py", "--server", real.grpc, "--max-tokens", "120").splitlines()
    assert re.match(r"choice: '(yes|no)' \[\d+ tokens", choice)
    assert re.match(r"regex: '[12][0-9]{3}' \[\d+ tokens", regex)
    text = ast.literal_eval(schema.removeprefix("json_schema: ").rpartition(" [")[0])
    assert re.match(r'\{\s*"name"', text)
    if cut:  # a random model may generate white space without end
        assert "cut off" in cut[0]
    else:
        assert set(json.loads(text)) == {"name", "age", "likes"}


def test_own_drafter(run: Run) -> None:
    assert typed(EXAMPLES / "own_drafter.py") == ["python examples/own_drafter.py --target smollm2-135m"]
    output = run("own_drafter.py", "--target", TARGET, "--max-tokens", "48")
    assert figure(r"\[(\d+) steps without", output) > figure(r", (\d+) with bigrams", output) > 0
    assert figure(r"\[(\d+) of", output) > 0


def test_the_own_drafter_can_be_served() -> None:
    """The drafter that its `build` returns has a name that requests can use."""
    from specdec.config import EngineConfig

    found = runpy.run_path(str(EXAMPLES / "own_drafter.py"))
    engine = found["build"](EngineConfig(target=TARGET, kv_tokens=256, threads=1), lambda *_: None)
    assert engine.info().drafters[-1] == "bigram"
    engine.close()


def test_compare_off_auto(real: Real, run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one two one two one two\n\nabc abc abc\n")
    output = run("compare_off_auto.py", "--server", real.grpc, "--max-tokens", "16", str(prompts)).splitlines()
    assert [line.split()[0] for line in output[1:3]] == ["16", "16"]
    assert re.fullmatch(r"all: \d+ ms off, \d+ ms auto, ratio [\d.]+", output[3])
    assert len(output) == 4
    prompts.write_text("\n")
    with pytest.raises(SystemExit, match="holds no prompt"):
        run("compare_off_auto.py", "--server", real.grpc, str(prompts))


FENCED = r"^```sh\n(.*?)^```"


def typed(page: Path) -> list[str]:
    """The commands of ``page``: of its shell blocks, of its indented blocks, and of an example's usage."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(FENCED, text, re.MULTILINE | re.DOTALL)
    if page.suffix == ".md":
        blocks += re.findall(
            r"(?:^ {4}\S.*\n)+", re.sub(FENCED, "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
        )
    else:
        blocks += re.findall(r"^(?:# +)?((?:python|sh) examples/.*)$", text, re.MULTILINE)
    found, unfinished = [], ""
    for line in "\n".join(blocks).splitlines():
        unfinished += f"{line}\n" if unfinished else line.strip() + "\n"
        with suppress(ValueError):  # a quotation that continues on the next line
            shlex.split(unfinished, comments=True)
            found.append(re.sub(r"\s+# .*", "", unfinished).strip())
            unfinished = ""
    assert not unfinished
    return [command for command in found if command]


PAGES = (REPOSITORY / "README.md", REPOSITORY / "docs" / "quickstart.md", *sorted(EXAMPLES.glob("*.[ps][yh]")))
LONG = re.compile(r"specdec (verify|doctor)")  # many runs; the machine's bandwidth
ELSEWHERE = re.compile(r"make |python examples/own_drafter")  # tests/test_makefile.py, test_own_drafter
DEFAULT = re.compile(r"^\S*python(?= )|(?<=\.py) --server 127.0.0.1:8400")  # an example is the same without
COMMANDS = [
    pytest.param(command, id=f"{page.name}: {command[:50]}", marks=[pytest.mark.slow] if LONG.search(command) else [])
    for command, page in {
        DEFAULT.sub("", command): (command, page) for page in PAGES for command in typed(page)
    }.values()
    if not ELSEWHERE.match(command)
]
EDITOR = "".join(
    f"Content-Length: {len(message)}\r\n\r\n{message}"
    for message in (
        '{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"capabilities":{}}}',
        '{"jsonrpc":"2.0","id":2,"method":"shutdown"}',
        '{"jsonrpc":"2.0","method":"exit"}',
    )
)
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Ada"]}}, "required": ["name"]}


@pytest.fixture
def checkout(tmp_path: Path, real: Real) -> Path:
    """A folder in which the commands' relative paths lead to this environment and to the files that they name; the
    packages are not in it."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    (tmp_path / "old.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "request.txt").write_text("Rename add to plus.")
    (tmp_path / "prompts.txt").write_text("one two one two\n")
    (tmp_path / "schema.json").write_text(json.dumps({**SCHEMA, "additionalProperties": False}))
    (tmp_path / "fast.yaml").write_text(FAST)
    return tmp_path


def with_tiny_model(command: str, real: Real) -> str:
    """``command`` on ``real`` instead of the default ports, and on its model instead of one that is fetched."""
    command = command.replace("http://127.0.0.1:8401", real.http).replace("127.0.0.1:8400", real.grpc)
    command = re.sub(r"(smollm2-135m|qwen2.5-coder-1.5b --draft auto)\b", TARGET, command)
    local = re.match(r"\S*specdec (generate|chat|serve|doctor|verify)\b", command)
    if local and "--server" not in command:
        options = " --config fast.yaml"
        if local[1] == "serve":
            options += " --grpc-port 0 --http-port 0"
        if TARGET not in command:
            options += f" --target {TARGET}"
        command = command[: local.end()] + options + command[local.end() :]
    if "own_drafter" not in command and "examples/" in command and "--server" not in command:
        command += (
            f" {real.http}"
            if command.startswith("sh ")
            else f" --server {real.http if 'openai' in command else real.grpc}"
        )
    return command


@pytest.mark.parametrize("command", COMMANDS)
def test_every_shown_command_runs(command: str, real: Real, checkout: Path) -> None:
    words = with_tiny_model(command, real)
    if words.startswith("curl") and CURL is None:
        pytest.skip("this machine has no curl")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["PATH"] = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    shell = subprocess.Popen(
        ["bash", "-c", words], cwd=checkout, env=environment, text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with shell:
        assert shell.stdout is not None
        if " serve " in words:
            assert "ready: " in shell.stdout.readline()
            os.killpg(shell.pid, signal.SIGTERM)
        printed, errors = shell.communicate(EDITOR if " lsp " in words else "Hello!\n", timeout=200)
    assert shell.returncode == 0, (words, errors)
    for noise in ("Traceback", "Warning", ".cc:"):
        assert noise not in errors, (words, errors)
    if words.startswith("curl"):
        assert json.loads(printed)["metrics"]["speculative_decoding"]["num_steps"] > 0


def test_the_commands_are_found() -> None:
    found = [parameter.values[0] for parameter in COMMANDS]
    assert len(found) > 20
    assert {word for command in found for word in re.findall(r"specdec (\w+)", command)} >= {"serve", "chat", "status"}
    assert sum(command.startswith("curl") for command in found) == 3


def test_every_example_is_listed_and_tested() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    names = [path.name for path in sorted(EXAMPLES.iterdir()) if path.suffix in (".py", ".sh")]
    assert len(names) >= 6
    for name in names:
        assert f'"{name}"' in here, name
        assert f"]({name})" in listed, name
