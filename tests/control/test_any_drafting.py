"""The promise under any controller: whatever is drafted, requested or estimated to cost, tokens stay the same."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence as Seq
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from draft.protocol import DraftTask, ModelBasedDrafter
from specdec.config import SpeculationConfig
from specdec.control.estimates.costs import CostTable
from specdec.control.params import DEFAULT_PARAMS as PARAMS
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.core.types import (
    Delta,
    Finished,
    Request,
    RequestEvent,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from specdec.engine.engine import Engine
from specdec.engine.profile_costs import StepCosts
from tests.engine.test_path_identity import requests as any_requests
from tests.engine.tiny_engine import failures, tiny_engine, tiny_parts

VOCAB = 380
Outcome = tuple[list[int], list[Any], str]
Outcomes = dict[tuple[str, int], Outcome]


class Guessing(ModelBasedDrafter):
    """Random trees, the true continuation among them more often than not, with probabilities drawn from nowhere."""

    def __init__(self, name: str, model_based: bool, seed: int, truth: dict[tuple[str, int], list[int]]) -> None:
        self.name, self.model_based, self._truth = name, model_based, truth
        self._draws = random.Random(seed)

    def warm_up(self, rows: int) -> None: ...

    def pending_prefill(self, sequence: Sequence) -> int:
        return self._draws.choice((0, 1, 5, 40))

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        return [self._tree(task) for task in tasks]

    def _tree(self, task: DraftTask) -> TokenTree:
        draws, sequence, tree = self._draws, task.sequence, TokenTree(task.sequence.tokens[-1])
        rest = self._truth.get((sequence.request.request_id, sequence.index), [])[sequence.n_output :]
        node = 0
        for token in rest[: draws.randint(0, 9)]:
            node = task.add(tree, node, token, draws.random() or 1.0, draws.randrange(4))
            if node < 0:
                break
        for _ in range(draws.randint(0, 6)):
            task.add(
                tree, draws.randrange(len(tree)), draws.randrange(VOCAB), draws.random() or 1.0, draws.randrange(6)
            )
        return tree


def table(draws: random.Random) -> dict[str, Any]:
    """Any rising costs, from next to nothing to absurd."""
    ms = draws.choice((1e-3, 1.0, 50.0))
    slope = draws.choice((0.0, 0.01, 1.0, 30.0))
    return CostTable([1, 8, 96], [0], [[ms, ms * (1 + 7 * slope), ms * (1 + 95 * slope)]]).as_dict()


def decode(engine: Engine, requests: Seq[Request], together: int, preempt_every: int = 0) -> Outcomes:
    """Return the generated tokens, with ``together`` requests in flight."""
    waiting, running, steps = list(reversed(requests)), 0, 0
    events: list[RequestEvent] = []
    while waiting or engine.has_work():
        live = engine.load()
        running = live.running_requests + live.waiting_requests
        while waiting and running < together:
            engine.submit(waiting.pop())
            running += 1
        steps += 1
        if preempt_every and steps % preempt_every == 0:
            engine.preempt_newest()
        events += engine.step()
        assert steps < 5000
    assert not failures(events)
    out: Outcomes = {}
    for event in events:
        if isinstance(event, Delta):
            tokens, logprobs, _ = out.setdefault((event.request_id, event.index), ([], [], ""))
            tokens += event.token_ids
            logprobs += [(entry.logprob, tuple(entry.top)) for entry in event.logprobs]
        elif isinstance(event, Finished):
            tokens, logprobs, _ = out.setdefault((event.request_id, event.index), ([], [], ""))
            out[event.request_id, event.index] = tokens, logprobs, f"{event.reason} {event.matched_stop}"
    return out


modes = st.sampled_from([SpeculationMode.AUTO, SpeculationMode.AUTO, SpeculationMode.ON, SpeculationMode.OFF])
wishes = st.builds(
    SpeculationParams,
    mode=modes,
    drafters=st.sampled_from([None, None, ("free",), ("dear",), ()]),
    max_nodes=st.sampled_from([None, None, 0, 1, 3, 40]),
    max_depth=st.sampled_from([None, None, 0, 1, 4]),
    width=st.sampled_from([None, 1, 5]),
)
objectives = st.tuples(st.sampled_from([None, 1e-6, 5.0, 1e9]), st.sampled_from([None, 600.0, 1e6]))


@st.composite
def speculating(draw: st.DrawFn) -> list[Request]:
    """Requests of every kind, each with its own wish and objective."""
    drawn = draw(st.lists(any_requests, min_size=1, max_size=5))
    named = []
    for i, request in enumerate(drawn):
        tpot, deadline = draw(objectives)
        named.append(
            dataclasses.replace(
                request, request_id=f"r{i}", speculation=draw(wishes), target_tpot_ms=tpot, deadline_s=deadline
            )
        )
    return named


@settings(max_examples=60)
@given(
    drawn=speculating(),
    seed=st.integers(0, 2**32),
    together=st.integers(1, 5),
    preempt_every=st.sampled_from([0, 0, 7]),
    pages=st.sampled_from([None, 9]),
    chunk=st.sampled_from([7, 64]),
    probe_every=st.integers(2, 20),
)
def test_tokens_do_not_depend_on_drafts(
    drawn: list[Request], seed: int, together: int, preempt_every: int, pages: int | None, chunk: int, probe_every: int
) -> None:
    off = SpeculationParams(SpeculationMode.OFF)
    plain = decode(tiny_engine(pages=pages), [dataclasses.replace(request, speculation=off) for request in drawn], 1)
    draws = random.Random(seed)
    truth = {key: tokens for key, (tokens, _, _) in plain.items()}
    drafters = [Guessing("free", False, seed, truth), Guessing("dear", True, seed + 1, truth)]
    config: SpeculationConfig = tiny_parts().config.speculation.model_copy(update={"max_nodes": 31, "max_depth": 12})
    costs = StepCosts(table(draws), {"dear": table(draws)})
    parts = dataclasses.replace(
        tiny_parts(),
        drafters=drafters,
        costs=costs,
        control_params=dataclasses.replace(PARAMS, probe_every=probe_every),
    )
    engine = tiny_engine(parts, pages, speculation=config, prefill_chunk=chunk)
    assert decode(engine, drawn, together, preempt_every) == plain


def test_such_drafts_are_verified_and_accepted() -> None:
    """Or the property above would be about nothing."""
    request = Request(
        "r0",
        (5, 6, 7),
        SamplingParams(seed=3),
        StoppingParams(max_tokens=60, ignore_eos=True),
        speculation=_mode("off"),
    )
    truth = {key: tokens for key, (tokens, _, _) in decode(tiny_engine(), [request], 1).items()}
    for mode in ("on", "auto"):
        drafters = [Guessing("free", False, 1, truth), Guessing("dear", True, 2, truth)]
        engine = tiny_engine(dataclasses.replace(tiny_parts(), drafters=drafters))
        engine.submit(dataclasses.replace(request, speculation=_mode(mode)))
        events: list[RequestEvent] = []
        while engine.has_work():
            events += engine.step()
        (done,) = [event for event in events if isinstance(event, Finished)]
        assert {name for name, stats in done.stats.by_drafter.items() if stats.num_accepted_draft_tokens} == {
            "free",
            "dear",
        }
        assert done.stats.num_accepted_draft_tokens > 15


def _mode(name: str) -> SpeculationParams:
    return SpeculationParams(SpeculationMode(name))
