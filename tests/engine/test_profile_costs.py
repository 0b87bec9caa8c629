"""Costs that were measured before: taken over at the machine's present speed, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from torch import Tensor

from specdec.config import EngineConfig, SpeculationConfig
from specdec.control.estimates.costs import CostTable
from specdec.engine import profile_costs
from specdec.engine.build import build_parts
from specdec.engine.profile_cache import ProfileCache
from specdec.engine.profile_costs import Point, StepCosts, _again, check_costs, costs_at_start
from tests.engine.tiny_engine import tiny_parts
from verify_kernels.forward_batch import ForwardBatch

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 1024)
CACHE = Path("~/.cache/specdec").expanduser()


def price(rows: int, context: int) -> float:
    return 50.0 + 1.5 * (rows - 1) + 0.001 * context * rows


def table() -> CostTable:
    return CostTable(ROWS, CONTEXTS, [[price(n, c) for n in ROWS] for c in CONTEXTS])


def points() -> dict[Point, Callable[[], None]]:
    return {(n, c): lambda: None for n in ROWS for c in CONTEXTS}


def measured(monkeypatch: pytest.MonkeyPatch, truth: Callable[[int, int], float]) -> None:
    monkeypatch.setattr(
        profile_costs, "_best", lambda points, seconds, settling: {point: truth(*point) for point in points}
    )


@pytest.mark.parametrize(("reading", "rows"), [(1.0, 1.0), (1.4, 1.4), (1.3, 0.8), (0.7, 1.9)])
def test_a_few_forwards_detect_a_machine_of_another_speed(
    reading: float, rows: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def truth(n: int, context: int) -> float:
        return reading * price(1, context) + rows * (price(n, context) - price(1, context))

    measured(monkeypatch, truth)
    found = _again(table(), points(), 0)
    assert found is not None
    now = CostTable.from_dict(found)
    for n in ROWS:
        for context in CONTEXTS:
            assert now.ms(n, context) == pytest.approx(truth(n, context), rel=1e-6)


@pytest.mark.parametrize(
    "truth",
    [
        lambda n, context: 9.0 * price(n, context),
        lambda n, context: 0.1 * price(n, context),
        lambda n, context: price(n, context) * (1.5 if n == 8 else 1.0),
        lambda n, context: price(n, context) * (1.5 if context > 64 else 1.0),
    ],
)
def test_outdated_costs_are_measured_again(truth: Callable[[int, int], float], monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, truth)
    assert _again(table(), points(), 0) is None


@pytest.mark.parametrize(("slower", "tree_rows", "lines"), [(0.5, 0, 0), (1.5, 0, 1), (1.5, 8, 0)])
def test_a_draft_model_that_cannot_pay_is_named_at_start(
    slower: float, tree_rows: int, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    level = CostTable([1, 8], [0], [[slower * price(1, 0), slower * price(8, 0)]])
    costs = StepCosts(table().as_dict(), {"model": level.as_dict()})
    monkeypatch.setattr(profile_costs, "check_costs", lambda *_: costs)
    drafter = SimpleNamespace(name="model", model_based=True, tree_rows=tree_rows)
    assert costs_at_start(SpeculationConfig(), cast(Any, None), [cast(Any, drafter)], cast(Any, None)) is costs
    assert len(caplog.messages) == lines
    assert all("drafter model: a draft token takes 75.0 ms" in line for line in caplog.messages)


def test_missing_costs_are_measured_again(tmp_path: Path) -> None:
    parts, kept = tiny_parts(), ProfileCache(tmp_path, "costs", ["x"])
    assert check_costs(parts.decoder, [], kept) is None


@pytest.mark.parametrize("max_context", [8, 63, 128])
def test_a_draft_is_measured_within_the_longest_context(max_context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProfileCache, "read", lambda cache: None)
    monkeypatch.setattr(ProfileCache, "write", lambda cache, values: None)
    speculation = SpeculationConfig(drafters=("model",), profile_s=0.01)
    config = EngineConfig(
        target="random:tiny", draft="random:tiny", device="cpu", cache_dir=CACHE, threads=1, kv_tokens=64 * 20,
        max_batch=2, max_context=max_context, speculation=speculation,
    )  # fmt: skip
    assert "model" in build_parts(config).costs.drafting


def test_rows_are_measured_with_tokens_that_differ() -> None:
    """In a mixture of experts equal tokens choose the same experts, which cost as much as those of one row."""
    seen: list[list[int]] = []
    decoder = tiny_parts().decoder
    forward = decoder.forward

    def watched(batch: ForwardBatch, logit_rows: Sequence[int]) -> Tensor:
        seen.append(batch.tokens.tolist())
        return forward(batch, logit_rows)

    with mock.patch.object(decoder, "forward", watched):
        profile_costs.profile_costs(decoder, [], 0.0)
    assert max(map(len, seen)) >= 32
    assert all(len(set(tokens)) == len(tokens) for tokens in seen)


@pytest.mark.parametrize(("positions", "largest"), [(4096, 300), (1200, 128)])
def test_padded_forwards_are_measured_at_every_size_that_fits(
    positions: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of prompts, with the logits of one row."""
    seen = set()

    def forward(batch: Any, logit_rows: list[int]) -> None:
        seen.add((batch.rows, len(logit_rows)))

    sizes = (1, 2, 4, 8, 16, 32, 48, 64, 128, 300)
    decoder = SimpleNamespace(
        config=SimpleNamespace(vocab_size=1000),
        row_sizes=sizes, max_rows=300, max_logit_rows=48, max_positions=positions, settling=1,
        pool=SimpleNamespace(pages=100), forward=forward,
    )  # fmt: skip
    costs = profile_costs.profile_costs(cast(Any, decoder), [], 0.0)
    assert seen == {(n, n if n <= 32 else 1) for n in sizes if n <= largest}
    assert costs.verify["sizes"] == list(sizes)
    measured = [n for n in sizes if n <= largest]
    assert costs.verify["rows"][: len(measured)] == measured


def test_nothing_is_measured_with_plain_kernels(tmp_path: Path) -> None:
    """A forward of many rows takes them minutes; the start must not wait for it."""
    config = EngineConfig(
        target="random:tiny", device="cpu", kernels="reference", cache_dir=tmp_path, threads=1, kv_tokens=64 * 20,
        max_batch=2, max_context=128,
    )  # fmt: skip
    assert build_parts(config).costs is None
    assert not (tmp_path / "controller").exists()
