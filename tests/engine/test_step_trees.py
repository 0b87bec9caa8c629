"""The tree of a step in an answer: the verified nodes, and which were accepted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from specdec.core.types import (
    POSITIONS,
    Delta,
    OutputParams,
    Request,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from tests.engine.tiny_engine import finish_of, run_all, tiny_engine, tiny_parts, tokens_of

PROMPT = tuple(tiny_parts().tokenizer.encode("one two three one two three one two"))


def make_request(mode: SpeculationMode, trees: bool, temperature: float = 0.0) -> Request:
    return Request(
        "r", PROMPT, SamplingParams(temperature=temperature, seed=3), StoppingParams(max_tokens=24, ignore_eos=True),
        OutputParams(trees=trees), SpeculationParams(mode),
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("mode", list(SpeculationMode))
def test_trees_record_the_source_of_each_token(mode: SpeculationMode, temperature: float) -> None:
    events = run_all(tiny_engine(), [make_request(mode, True, temperature)])
    generated, last = [], PROMPT[-1]
    nodes = accepted = 0
    for delta in (e for e in events if isinstance(e, Delta) and e.token_ids):
        tree = delta.tree
        assert tree is not None
        assert (tree.tokens[0], tree.parents[0], tree.sources[0], tree.chances[0]) == (last, -1, [], 1.0)
        assert all(0 <= parent < node for node, parent in enumerate(tree.parents[1:], 1))
        assert all(tree.sources[1:])
        assert all(0.0 <= chance <= 1.0 for chance in tree.chances)
        at = 0
        for node, token in zip(tree.accepted, delta.token_ids, strict=False):
            assert (tree.parents[node], tree.tokens[node]) == (at, token)
            at = node
        own = len(delta.token_ids) - len(tree.accepted)
        assert own in (0, 1)  # none if a limit cut the walk
        if own and any(p == at for p in tree.parents):  # the target's own token is none of the rejected ones
            assert delta.token_ids[-1] not in [t for t, p in zip(tree.tokens, tree.parents, strict=True) if p == at]
        assert tree.verify_ms > 0
        nodes, accepted, last = nodes + len(tree.tokens) - 1, accepted + len(tree.accepted), delta.token_ids[-1]
        generated += delta.token_ids
    stats = finish_of(events, "r").stats
    assert (nodes, accepted) == (stats.num_draft_tokens, stats.num_accepted_draft_tokens)
    assert (nodes > 0) == (mode is SpeculationMode.ON) or mode is SpeculationMode.AUTO
    assert generated == tokens_of(run_all(tiny_engine(), [make_request(SpeculationMode.OFF, False, temperature)]), "r")


def test_acceptance_by_position_counts_each_tree_once() -> None:
    """Several nodes of a drafter at one depth are one proposal; depths beyond the last position are not counted."""
    wish = SpeculationParams(SpeculationMode.ON, None, 20, 12, 2)
    twin = tiny_engine()
    twin.swap_draft(twin.load_draft(tiny_parts().config.target, "int8"))
    events = run_all(twin, [replace(make_request(SpeculationMode.ON, True), speculation=wish)])
    proposed: Counter[tuple[str, int]] = Counter()
    accepted: Counter[tuple[str, int]] = Counter()
    for tree in (e.tree for e in events if isinstance(e, Delta) and e.tree is not None):
        depths = [0]
        for parent in tree.parents[1:]:
            depths.append(depths[parent] + 1)
        places = [{(source, depth) for source in names} for names, depth in zip(tree.sources, depths, strict=True)]
        proposed.update(set().union(*places))
        accepted.update(set().union(*(places[node] for node in tree.accepted)))
    assert max(depth for _, depth in accepted) > POSITIONS
    for name, part in finish_of(events, "r").stats.by_drafter.items():
        assert part.proposed_at == [proposed[name, k] for k in range(1, POSITIONS + 1)]
        assert part.accepted_at == [accepted[name, k] for k in range(1, POSITIONS + 1)]


def test_trees_cost_nothing_unless_requested() -> None:
    shown, plain = (
        make_request(SpeculationMode.ON, True),
        replace(make_request(SpeculationMode.ON, False), request_id="plain"),
    )
    events = run_all(tiny_engine(), [shown, plain])
    assert all(e.tree is None for e in events if isinstance(e, Delta) and e.request_id == "plain")
    assert tokens_of(events, "plain") == tokens_of(events, "r")


def test_accepted_nodes_behind_the_end_are_not_counted() -> None:
    """The drafts of a twin are right, so a step accepts nodes behind the stop token."""
    plain = tokens_of(run_all(tiny_engine(), [make_request(SpeculationMode.OFF, False, 0.9)]), "r")
    twin = tiny_engine()
    twin.swap_draft(twin.load_draft(tiny_parts().config.target, "int8"))
    chains = SpeculationParams(SpeculationMode.ON, None, 20, 12, 1)
    asked = replace(make_request(SpeculationMode.ON, True, 0.9), speculation=chains)
    cut = 0
    for at in (at for at in range(8, 20) if plain[at] not in plain[:at]):
        events = run_all(twin, [replace(asked, stopping=replace(asked.stopping, stop_token_ids=(plain[at],)))])
        assert tokens_of(events, "r") == plain[: at + 1]
        last = [e for e in events if isinstance(e, Delta) and e.tree is not None][-1]
        assert last.tree is not None
        assert len(last.tree.accepted) <= len(last.token_ids)
        cut += len(last.tree.accepted) == len(last.token_ids)
        stats = finish_of(events, "r").stats
        assert stats.num_accepted_draft_tokens <= at + 1
    assert cut > 3
