"""All drafters together in a real engine, including a random feature head: speed may change, output may not."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import weakref
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.path_identity import PLAIN, BatchConditions, first_mismatches, run_conditions
from draft.head import HeadDrafter
from specdec.core.sequence import Sequence
from specdec.core.types import (
    GrammarKind,
    GrammarParams,
    Request,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from specdec.engine.build import build_parts
from specdec.engine.engine import EngineParts
from tests.draft.eagle3_checkpoint import head_config, head_tensors, write_head
from tests.draft.test_token_index import write as write_index_of
from tests.engine.test_path_identity import named, prompts, samplings, stoppings
from tests.engine.tiny_engine import drain, tiny_engine, tiny_parts

GREEDY = SamplingParams(temperature=0.0)
REPEATED = [7, 8, 9, 10, 11] * 20
LONG = StoppingParams(max_tokens=40, ignore_eos=True)
ALL = ("grammar", "prediction", "suffix", "index", "model", "head", "oracle:0.7")


@functools.cache
def every_parts() -> EngineParts:
    base = tiny_parts()
    vocab = base.info.vocab_size
    folder = Path(base.config.target).parent / "head"
    hidden = json.loads((Path(base.config.target) / "config.json").read_text())["hidden_size"]
    write_head(
        folder, head_config(vocab, 200, eagle_aux_hidden_state_layer_ids=[0, 1, 1]), head_tensors(hidden, vocab, 200)
    )
    speculation = base.config.speculation.model_copy(update={"drafters": ALL})
    changes = {"draft_head": str(folder), "indexes": {"mine": _index(base, folder)}, "speculation": speculation}
    return build_parts(base.config.model_copy(update=changes))


def _index(parts: EngineParts, folder: Path) -> Path:
    """An index of texts like those of the requests."""
    rows = [REPEATED, *([*range(i, i + 12)] for i in range(0, 360, 5))]
    return write_index_of(
        folder / "mine.index", rows, parts.tokenizer.vocab_size, fingerprint=parts.tokenizer.fingerprint
    )


requests = st.builds(
    Request,
    request_id=st.just(""),
    prompt_ids=prompts(),
    sampling=samplings,
    stopping=stoppings,
    prediction_ids=st.lists(st.integers(0, 379), max_size=30).map(tuple),
    session=st.sampled_from(["", "s"]),
    target_tpot_ms=st.sampled_from([None, 0.01, 1e6]),
)
all_conditions = st.builds(
    BatchConditions,
    name=st.just("drawn"),
    drafters=st.sampled_from(
        [ALL, ("head",), ("head", "model"), ("oracle:0.7",), ("prediction", "suffix"), ("index",)]
    ),
    max_nodes=st.integers(1, 20),
    max_depth=st.integers(1, 8),
    width=st.integers(1, 4),
    concurrency=st.integers(1, 8),
    prefill_chunk=st.sampled_from([6, 64]),
    kv_pages=st.sampled_from([None, 9, 12]),
    preempt_every=st.sampled_from([0, 5]),
    warm=st.booleans(),
    controlled=st.booleans(),
    free=st.booleans(),
)


@settings(max_examples=40)
@given(drawn=st.lists(requests, min_size=1, max_size=6), conditions=all_conditions)
def test_no_drafter_changes_a_token(drawn: list[Request], conditions: BatchConditions) -> None:
    parts = every_parts()
    plain = run_conditions(parts, PLAIN, named(drawn))
    mismatches = first_mismatches(conditions.name, plain, run_conditions(parts, conditions, named(drawn)))
    assert not mismatches, mismatches[0]


@pytest.mark.parametrize("drafter", ["head", "model", "suffix", "index", "oracle:0.7", "prediction"])
def test_each_drafter_contributes(drafter: str) -> None:
    prompt = tuple(REPEATED)
    ask = Request("", prompt, GREEDY, LONG, prediction_ids=tuple(prompt))
    parts = every_parts()
    conditions = BatchConditions("one", (drafter,), 6, 3, 2)
    run_conditions(parts, conditions, named([ask]))  # the oracle learns
    outcome = run_conditions(parts, conditions, named([ask]))[("r0", 0)]
    assert outcome.drafted > 0


def test_the_head_observes_the_targets_hidden_states() -> None:
    (head,) = [d for d in every_parts().drafters if isinstance(d, HeadDrafter)]
    assert head.digest
    observed: list[tuple[int, int]] = []
    listen = head.features
    head.features = lambda seq, start, rows: (observed.append((start, rows.shape[0])), listen(seq, start, rows))  # type: ignore[method-assign,func-returns-value,assignment]
    try:
        prompt = tuple(range(5, 105))
        run_conditions(
            every_parts(), BatchConditions("one", ("head",), 4, 4, 1), named([Request("", prompt, GREEDY, LONG)])
        )
    finally:
        head.features = listen  # type: ignore[method-assign]
    ends = [start + n for start, n in observed]
    assert observed[0][0] == 0
    assert [start for start, _ in observed[1:]] == ends[:-1]  # no gap, no overlap
    assert ends[-1] == 100 + 40 - 1


def test_nothing_keeps_a_sequence_that_has_ended() -> None:
    """Ended, aborted or preempted, whatever drafted for it."""
    engine = tiny_engine(every_parts(), pages=9)
    wish = SpeculationParams(SpeculationMode.ON, None, 6, 3, 2)
    ended: list[weakref.ref[Sequence]] = []
    for turn in range(3):
        for i, grammar in enumerate([None, GrammarParams(GrammarKind.CHOICE, '["yes it is", "no"]')]):
            ask = Request(f"r{turn}{i}", (*REPEATED, turn), GREEDY, LONG, speculation=wish, session="s")
            engine.submit(dataclasses.replace(ask, prediction_ids=tuple(REPEATED), grammar=grammar))
        engine.submit(Request(f"r{turn}", (7, 8, 9), SamplingParams(n=3, seed=1), LONG))
        for step in range(12):
            engine.step()
            if step % 4 == 3:
                engine.preempt_newest()
        if turn < 2:  # the engine keeps its last step
            ended += map(weakref.ref, engine._requests.sequences())
        assert engine.abort(f"r{turn}")
        drain(engine)
    gc.collect()
    assert len(ended) > 6
    assert not any(ref() for ref in ended)
