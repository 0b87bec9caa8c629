"""`specdec serve` and `specdec generate` with a real model, as a person would type them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SPECDEC = [sys.executable, "-m", "specdec.cli.main"]
PROMPT = "red green blue black white\n" * 4 + "red"  # repetition, so that there is something to draft


def generate(*args: str) -> dict[str, Any]:
    """The JSON object of one greedy request."""
    command = [*SPECDEC, "generate", PROMPT, "--max-tokens", "24", "--json", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def trace(*args: str) -> str:
    """Return the output of `specdec trace`."""
    done = subprocess.run([*SPECDEC, "trace", *args], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


@pytest.mark.model
def test_a_real_server_streams_and_shuts_down_cleanly(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    command = [*SPECDEC, "serve", "--grpc-port", "0", "--http-port", "0", "--kv-tokens", "2048", "--quiet"]
    command += ["--trace-file", str(file), "--kv-disk-bytes", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(4)]
            assert lines[0].startswith("ready: smollm2-135m, auto")
            address = re.findall(r"gRPC +(\S+)", lines[1])[0]
            off, auto = (generate("--server", address, "--speculation", mode) for mode in ("off", "auto"))
            here = generate("--kv-tokens", "2048")
            steps = [json.loads(line) for line in trace("--server", address, "--limit", "1000", "--json").splitlines()]
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    assert len(off["token_ids"]) == off["usage"]["output_tokens"] > 0
    assert off["token_ids"] == auto["token_ids"] == here["token_ids"]
    assert off["text"] == auto["text"] == here["text"]
    plain, drafted = (found["metrics"]["speculative_decoding"] for found in (off, auto))
    assert plain["num_draft_tokens"] == 0
    assert drafted["num_accepted_draft_tokens"] > 0
    assert drafted["num_steps"] < plain["num_steps"]
    kept = [json.loads(line) for line in trace("show", str(file), "--limit", "1000", "--json").splitlines()]
    assert kept == steps
    assert sum(step["realised_tokens"] for step in steps) >= 2 * len(off["token_ids"])
    assert "0 differences" in trace("replay", str(file))
