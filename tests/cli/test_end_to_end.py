"""`specdec serve` and `specdec generate` with a real model, as a person would type them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
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


@pytest.mark.model
def test_a_real_server_streams_and_stops_in_order() -> None:
    command = [*SPECDEC, "serve", "--grpc-port", "0", "--http-port", "0", "--kv-tokens", "2048", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(4)]
            assert lines[0].startswith("ready: smollm2-135m, int8")
            address = re.findall(r"gRPC +(\S+)", lines[1])[0]
            off, auto = (generate("--server", address, "--speculation", mode) for mode in ("off", "auto"))
            here = generate("--kv-tokens", "2048")
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    assert len(off["token_ids"]) == off["usage"]["output_tokens"] > 0
    assert off["token_ids"] == auto["token_ids"] == here["token_ids"]
    assert off["text"] == auto["text"] == here["text"]
    assert off["speculation"]["num_draft_tokens"] == 0
    assert auto["speculation"]["num_accepted_tokens"] > 0
    assert auto["speculation"]["num_steps"] < off["speculation"]["num_steps"]
