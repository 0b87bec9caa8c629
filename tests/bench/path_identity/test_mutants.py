"""`specdec verify` detects a broken engine: each mutant breaks one property that path identity needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bench import path_identity
from bench.path_identity import make_requests, verify
from specdec.core.sampling import SequenceSampling
from specdec.engine.scheduler import Scheduler
from specdec.errors import SpecdecError
from specdec.models.decoder import Decoder
from tests.engine.tiny_engine import tiny_parts
from verify_kernels import forward_batch
from verify_kernels.backend import KvTensors
from verify_kernels.forward_batch import NEVER, BatchEntry, ForwardBatch

Patch = pytest.MonkeyPatch


def accepted_kv_stays_where_it_was(patch: Patch) -> None:
    patch.setattr(KvTensors, "move", lambda *args: None)


def tree_rows_attend_to_their_slots(patch: Patch) -> None:
    build = ForwardBatch.build

    def wrong(entries: list[BatchEntry]) -> ForwardBatch:
        batch = build(entries)
        return dataclasses.replace(batch, diverge=np.full_like(batch.diverge, NEVER))

    patch.setattr(forward_batch.ForwardBatch, "build", staticmethod(wrong))


def noise_ignores_depth(patch: Patch) -> None:
    row = SequenceSampling.row

    def wrong(self: SequenceSampling, position: int, path: list[int], n_output: int) -> Any:
        return row(self, position - len(path), path, n_output)

    patch.setattr(SequenceSampling, "row", wrong)


def penalties_ignore_the_path(patch: Patch) -> None:
    row = SequenceSampling.row
    patch.setattr(SequenceSampling, "row", lambda self, position, path, n: row(self, position, (), n))


def logits_of_the_wrong_row(patch: Patch) -> None:
    forward = Decoder.forward
    patch.setattr(Decoder, "forward", lambda self, batch, rows: forward(self, batch, rows).roll(1, 0))


def preempted_sequences_keep_their_count(patch: Patch) -> None:
    preempt = Scheduler._preempt

    def wrong(self: Scheduler, seq: Any) -> Any:
        count = seq.n_computed
        preempt(self, seq)
        admit = self._kv.admit

        def admit_and_trust(other: Any, reserve: int = 0) -> Any:
            hit = admit(other, reserve)
            if other is seq and hit is not None:
                seq.n_computed = min(count, len(seq.tokens) - 1)
            return hit

        self._kv.admit = admit_and_trust  # type: ignore[method-assign]
        return seq

    patch.setattr(Scheduler, "_preempt", wrong)


MUTANTS = (
    accepted_kv_stays_where_it_was,
    tree_rows_attend_to_their_slots,
    noise_ignores_depth,
    penalties_ignore_the_path,
    logits_of_the_wrong_row,
    preempted_sequences_keep_their_count,
)


EVERY_MUTANT_SHOWS = "suffix+model, tree, preempted"


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda m: m.__name__)
def test_mutants_are_caught(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """Under the conditions in which all of them show."""
    every = path_identity.standard_conditions
    monkeypatch.setattr(
        path_identity,
        "standard_conditions",
        lambda *given: [one for one in every(*given) if one.name == EVERY_MUTANT_SHOWS],
    )
    mutate(monkeypatch)
    if mutate is penalties_ignore_the_path:  # and masks: a token the grammar forbids comes out, nothing may follow it
        with pytest.raises(SpecdecError, match="no finite logit"):
            verify(tiny_parts(), pairs=1, max_tokens=24, seed=1)
        return
    report = verify(tiny_parts(), pairs=1, max_tokens=24, seed=1)
    assert report.mismatches
    assert "expected" in report.mismatches[0]


def test_the_sound_engine_passes() -> None:
    report = verify(tiny_parts(), pairs=200, max_tokens=24, seed=1)
    assert report.total("pairs") >= 200
    assert report.total("accepted") > 50
    assert report.total("preemptions") > 10
    assert not report.mismatches, report.mismatches[0]


def test_every_request_has_an_output() -> None:
    requests = make_requests(tiny_parts().tokenizer, 20, seed=1, max_tokens=1)
    assert {request.stopping.max_tokens for request in requests} == {1}
