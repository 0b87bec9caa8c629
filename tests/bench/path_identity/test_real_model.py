"""Path identity of the default model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from bench import path_identity
from bench.workloads.workload import long_text
from specdec.cli.main import cli
from specdec.config import EngineConfig
from specdec.engine.build import build_parts
from specdec.models.catalogue import find_entry
from specdec.models.fetch import Fetcher
from verify_kernels.forward_batch import BatchEntry, ForwardBatch

CACHE = Path("~/.cache/specdec").expanduser()
pytestmark = pytest.mark.model


def _verify(*options: str) -> dict[str, object]:
    result = CliRunner().invoke(cli, ["verify", "--target", "smollm2-135m", "--json", *options])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


# Small models see the others too.
CONDITIONS = ("plain, chunks of 7", "plain, preempted", "controlled, free, preempted", "model, tree, preempted")


def test_verify_finds_no_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the drafter that proposes most; the others are with it in the slow test, and on small models."""
    every = path_identity.standard_conditions
    monkeypatch.setattr(
        path_identity, "standard_conditions", lambda *given: [one for one in every(*given) if one.name in CONDITIONS]
    )
    options = ("--draft", "smollm2-135m", "--drafter", "model", "--kv-tokens", "8192", "--threads", "1")
    figures = _verify("-n", "20", "--max-tokens", "8", *options)
    assert set(figures["conditions"]) == set(CONDITIONS)  # type: ignore[call-overload]
    assert figures["pairs"] >= 20  # type: ignore[operator]
    assert figures["mismatches"] == 0
    assert figures["accepted"] > 40  # type: ignore[operator]
    assert figures["preemptions"] > 0  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_verify_three_thousand_pairs() -> None:
    every = "grammar,prediction,suffix,model,oracle:0.7"
    figures = _verify("-n", "3000", "--draft", "smollm2-135m", "--drafter", every, "--kv-tokens", "8192", "--seed", "5")
    assert figures["pairs"] >= 3000  # type: ignore[operator]
    assert figures["mismatches"] == 0


def test_fp32_logits_equal_transformers() -> None:
    path = Fetcher(CACHE / "models").path(find_entry("smollm2-135m"))  # type: ignore[arg-type]
    parts = build_parts(
        EngineConfig(target="smollm2-135m", dtype="fp32", kv_dtype="fp32", kv_tokens=1024, cache_dir=CACHE)
    )
    tokens = parts.tokenizer.encode(long_text())[:200]
    logits = []
    for start in range(0, len(tokens), 50):
        rows = tokens[start : start + 50]
        batch = ForwardBatch.build([BatchEntry(rows, list(range(-1, len(rows) - 1)), start, [3, 1, 2, 0])])
        logits.append(parts.decoder.forward(batch, range(len(rows))).clone())
    got = torch.cat(logits)
    oracle = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0]
    assert torch.linalg.norm(got - expected) / torch.linalg.norm(expected) <= 1e-4
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.slow
def test_perplexity_of_rounded_weights_and_activations() -> None:
    result = CliRunner().invoke(cli, ["bench", "perplexity", "--target", "smollm2-135m", "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert abs(figures["int8_over_fp32"] - 1) <= 0.01
    assert abs(figures["bf16_over_fp32"] - 1) <= 0.01
    assert abs(figures["auto_over_fp32"] - 1) <= 0.005
