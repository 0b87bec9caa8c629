"""`specdec bench step` with a tiny model: all figures, and their relations."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import cast

import pytest
import torch
from click.testing import CliRunner

from bench.engine_bench import BenchError
from bench.forward import ROWS, StepBench, figures_of, perplexity
from specdec.cli.main import cli
from specdec.models.decoder import Decoder
from tests.engine.tiny_engine import tiny_parts
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe of the bandwidth reads 16 MiB, not a gigabyte."""
    monkeypatch.setattr("bench.machine.SIZE", 16 << 20)


def test_all_figures_of_a_model() -> None:
    parts = tiny_parts()
    figures = StepBench(parts).run(repeats=3)
    weights = cast(Decoder, parts.decoder).weights
    read = [weights.lm_head, *(w for each in weights.layers for w in (each.qkv, each.o, each.gate_up, each.down))]
    assert figures["weight_bytes"] == sum(w.nbytes for w in read) > 0
    assert list(figures["step_ms"]) == ["256"]  # the longer context does not fit the tiny model
    assert tuple(map(int, figures["step_ms"]["256"])) == ROWS
    assert all(time > 0 for time in figures["step_ms"]["256"].values())
    assert 0 < figures["not_forward_ms"] < figures["engine_step_ms"]
    printed = json.loads(json.dumps(figures))
    assert set(printed["definitions"]) <= set(printed)
    assert printed["prefill_tokens_per_s"] > 0


def test_a_context_that_is_named_twice_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def run(self: StepBench, repeats: int, contexts: tuple[int, ...]) -> None:
        asked.append(contexts)
        raise BenchError("enough")

    monkeypatch.setattr(StepBench, "run", run)
    monkeypatch.setattr("specdec.engine.build.build_parts", lambda *_: tiny_parts())
    for words in (["--context", "512", "--context", "256", "--context", "512"], []):
        CliRunner().invoke(cli, ["bench", "step", *words])
    assert asked == [(512, 256), (256, 2048)]


def test_ratios_are_of_the_shortest_context_however_contexts_are_named() -> None:
    parts = tiny_parts()
    printed = StepBench(parts).run(repeats=1, contexts=(128, 16))
    assert printed["row1_ms"] == printed["step_ms"]["16"]["1"]
    assert printed["rows8_over_rows1"] == printed["rows8_over_rows1_at_16"]


def test_a_context_that_is_left_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.engine.build.build_parts", lambda *_: tiny_parts())
    words = ["--repeats", "1", "--context", "100000", "--context", "16", "--json"]
    result = CliRunner().invoke(cli, ["bench", "step", *words])
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)["step_ms"]) == ["16"]
    assert "left out --context 100000: too long" in result.stderr


def test_no_repeats_are_refused() -> None:
    result = CliRunner().invoke(cli, ["bench", "step", "--repeats", "0"])
    assert result.exit_code == 2
    assert "'--repeats': 0 is not in the range x>=1" in result.output


def test_ratios_are_those_of_the_medians_beside_them() -> None:
    step_ms = {256: dict.fromkeys(ROWS, 60.0) | {1: 52.8004, 8: 64.6}, 2048: {1: 55.0, 8: 71.5}}
    printed = figures_of(1_543_000_000, 42.6031e9, step_ms)
    assert printed["row1_ms"] == printed["step_ms"]["256"]["1"] == 52.8
    assert printed["rows8_over_rows1"] == printed["rows8_over_rows1_at_256"] == round(64.6 / 52.8, 3)
    assert printed["rows8_over_rows1_at_2048"] == 1.3
    read_ms = printed["weight_bytes"] / (printed["read_bandwidth_gb_s"] * 1e9) * 1e3
    assert printed["bandwidth_fraction"] == round(read_ms / printed["row1_ms"], 3) == 0.686


@pytest.mark.parametrize("given", [1, 64, 65, 66, 240])
def test_perplexity_is_of_the_tokens_that_are_not_given(given: int) -> None:
    """Compared with windows read token by token. The given tokens end before, at and after the first chunk of 64."""
    parts = tiny_parts()
    text = "".join(chr(97 + (i * i) % 26) for i in range(430))
    ids = parts.tokenizer.encode(text)
    losses: list[float] = []
    for start in range(0, len(ids) - 1, 240):
        read = ids[start : start + 241]
        pages = list(range(len(read) // PAGE_SIZE + 1))
        for at in range(len(read) - 1):
            batch = ForwardBatch.build([BatchEntry([read[at]], [-1], at, pages)])
            logits = parts.decoder.forward(batch, [0])
            if at + 1 >= given:
                losses.append(float(torch.nn.functional.cross_entropy(logits, torch.tensor(read[at + 1 : at + 2]))))
    expected = math.exp(sum(losses) / len(losses))
    assert perplexity(parts, len(ids), 240, text, given) == (pytest.approx(expected, rel=1e-5), len(losses))
    assert perplexity(parts, 10_000, 240, text, given)[1] == len(losses)  # a text that is shorter


def test_perplexity_needs_something_to_score() -> None:
    for text in ("abcdef", ""):
        with pytest.raises(BenchError, match="--given: must leave tokens"):
            perplexity(tiny_parts(), 10, 512, text, given=200)


def test_bug_a_text_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("caf\xe9".encode("latin-1"))
    result = CliRunner().invoke(cli, ["bench", "perplexity", "--text", str(tmp_path / "text")])
    assert (result.exit_code, "--text: is not UTF-8 text" in result.output) == (2, True)


def test_a_model_on_a_gpu_is_refused() -> None:
    parts = tiny_parts()
    on_gpu = dataclasses.replace(parts, info=dataclasses.replace(parts.info, kernels="triton"))
    with pytest.raises(BenchError, match="bench step measures the CPU's kernels"):
        StepBench(on_gpu)
    with pytest.raises(BenchError, match="bench perplexity measures the CPU's kernels"):
        perplexity(on_gpu, 64)


def test_a_context_or_a_window_that_does_not_fit_is_told() -> None:
    parts = tiny_parts()
    limit = parts.info.max_context
    with pytest.raises(BenchError, match=f"--context: 100000 and 32 rows do not fit the model's {limit} tokens"):
        StepBench(parts).run(contexts=(100_000,))
    with pytest.raises(BenchError, match=f"--window: must be below the model's context of {limit} tokens"):
        perplexity(parts, 10_000, limit)
    assert perplexity(parts, 64, limit, "a short text")[0] > 1
