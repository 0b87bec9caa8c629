"""Everything in examples/ runs as it stands, against a real server of a tiny random model."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.markdown import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
TARGET = "random:tiny"
CURL = shutil.which("curl")
Run = Callable[..., str]


@dataclass(frozen=True)
class Real:
    """Where a running `specdec serve` listens."""

    grpc: str
    http: str


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    """A server of random weights, which needs no download; its costs are guessed, which saves the time to measure."""
    config = tmp_path_factory.mktemp("serve") / "specdec.yaml"
    config.write_text("engine: {threads: 1, kv_tokens: 4096, speculation: {profile_s: 0}}\n")
    command = [sys.executable, "-m", "specdec.cli.main", "serve", "--config", str(config), "--target", TARGET]
    command += ["--quiet", "--grpc-port", "0", "--http-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            said = "".join(process.stdout.readline() for _ in range(3))
            yield Real(re.findall(r"gRPC +(\S+)", said)[0], re.findall(r"HTTP +(http://[^/]+)", said)[0])
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example as `python examples/NAME ARGUMENTS` does; what it printed."""

    def running(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return running


def figure(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, text
    return int(found.group(1))


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_grpc_stream(mode: str, real: Real, run: Run) -> None:
    said = run("grpc_stream.py", "--server", real.grpc, "--speculation", mode, "--max-tokens", "40", "aaaa aaaa aaaa")
    assert figure(r"\[(\d+) tokens of prompt", said) > 20
    tokens, steps = figure(r"\[(\d+) tokens in", said), figure(r"\[(\d+) steps", said)
    accepted, drafted = figure(r"\[(\d+) of \d+ draft", said), figure(r"\[\d+ of (\d+) draft", said)
    assert 0 < steps <= tokens <= 40
    assert accepted <= drafted
    assert (drafted > 0) or mode != "on"
    assert (drafted == 0) or mode != "off"


def test_the_stream_says_what_is_wrong(real: Real, run: Run) -> None:
    with pytest.raises(SystemExit, match=r"INVALID_ARGUMENT.*CONTEXT|prompt"):
        run("grpc_stream.py", "--server", real.grpc, "x" * 5000)


def test_openai_prediction(real: Real, run: Run, tmp_path: Path) -> None:
    old = tmp_path / "old.py"
    old.write_text("def add(a, b):\n    return a + b\n")
    said = run("openai_prediction.py", "--server", real.http, "--max-tokens", "24", str(old), "Rename add to plus.")
    assert 0 < figure(r"\[(\d+) steps\]", said) <= figure(r"\[(\d+) tokens\]", said) <= 24
    came, rest = figure(r"prediction: (\d+) came", said), figure(r"came out, (\d+) did not", said)
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
    if cut:  # a random model may go on with white space for as long as it likes
        assert "cut off" in cut[0]
    else:
        assert set(json.loads(text)) == {"name", "age", "likes"}


def test_own_drafter(run: Run) -> None:
    said = run("own_drafter.py", "--target", TARGET, "--max-tokens", "48")
    assert figure(r"\[(\d+) steps without", said) > figure(r", (\d+) with bigrams", said) > 0
    assert figure(r"\[(\d+) of", said) > 0


def test_the_own_drafter_can_be_served() -> None:
    """What its `build` gives names the drafter, so that requests may."""
    from specdec.config import EngineConfig

    found = runpy.run_path(str(EXAMPLES / "own_drafter.py"))
    engine = found["build"](EngineConfig(target=TARGET, kv_tokens=256, threads=1), lambda *_: None)
    assert engine.info().drafters[-1] == "bigram"
    engine.close()


def test_compare_off_auto(real: Real, run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one two one two one two\n\nabc abc abc\n")
    said = run("compare_off_auto.py", "--server", real.grpc, "--max-tokens", "16", str(prompts)).splitlines()
    assert [line.split()[0] for line in said[1:3]] == ["16", "16"]
    assert re.fullmatch(r"all: \d+ ms off, \d+ ms auto, ratio [\d.]+", said[3])
    assert len(said) == 4
    prompts.write_text("\n")
    with pytest.raises(SystemExit, match="holds no prompt"):
        run("compare_off_auto.py", "--server", real.grpc, str(prompts))


@pytest.mark.skipif(CURL is None, reason="this machine has no curl")
def test_curl_commands_of_the_quickstart(real: Real) -> None:
    text = (REPOSITORY / "docs" / "quickstart.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if block.startswith("curl")]
    assert blocks
    for block in blocks:
        command = block.replace("http://127.0.0.1:8401", real.http)
        assert command != block
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(done.stdout)["metrics"]["speculative_decoding"]["num_steps"] > 0


def test_every_example_is_listed_and_tried() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    names = [path.name for path in sorted(EXAMPLES.iterdir()) if path.suffix in (".py", ".sh")]
    assert len(names) >= 6
    for name in names:
        assert f'"{name}"' in here, name
        assert f"]({name})" in listed, name
