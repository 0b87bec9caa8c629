"""The capacity of a replica."""

from __future__ import annotations

import pytest

from cluster.plan.profile import Overheads
from cluster.plan.sizing import ceiling
from tests.cluster.plan.profiles import asked, forward_ms, profile


def test_ceilings_by_hand() -> None:
    one = profile(overheads=Overheads(step_ms=1.0, step_ms_per_sequence=0.1), max_batch=8, kv_tokens=64 * 20)
    found = ceiling(one, [asked(0.0, 200, 100)], hit_rate=0.5)
    assert (found.kv_sequences, found.sequences) == (4, 4)  # 300 tokens take 5 pages of 20
    assert found.one_stream == pytest.approx(1000 / (forward_ms(1) + 1.1))
    assert found.decode == pytest.approx(4000 / (forward_ms(4) + 1.4))
    reading_s = 100 * forward_ms(192) / 192 / 1e3
    assert found.with_prompts == pytest.approx(100 / (reading_s + 100 / found.decode))


def test_drafts_raise_the_ceiling_by_their_gain() -> None:
    found = ceiling(profile(drafted=[(4, 3)]), [asked(0.0, 1, 10)], hit_rate=0.0)
    assert found.one_stream == pytest.approx(3000 / (forward_ms(5) + 2.0))
