"""The order in which engines are asked: every prompt once to each, and no engine gains by a steady drift."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bench.peers.peer import PeerPrompt, in_parts, one_by_one, turns
from tests.bench.peers.peers import arm

SESSIONS = st.lists(st.tuples(st.sampled_from(["", "", "a", "b"]), st.booleans()), max_size=20)


def made(kinds: list[tuple[str, bool]], workload: str = "w") -> list[PeerPrompt]:
    return [PeerPrompt(workload, str(i), (i,), 4, session=s, counted=c) for i, (s, c) in enumerate(kinds)]


@given(st.integers(1, 6), st.integers(1, 9))
def test_every_arm_gets_every_round_once(n_arms: int, n_rounds: int) -> None:
    arms = [arm(str(i)) for i in range(n_arms)]
    rounds = one_by_one(made([("", True)] * n_rounds))
    order = [(a.name, part[0].name) for a, part in turns(arms, rounds)]
    assert sorted(order) == sorted((a.name, str(r)) for a in arms for r in range(n_rounds))
    assert [name for _, name in order] == [str(r) for r in range(n_rounds) for _ in arms]


@given(st.integers(1, 6), st.integers(1, 4))
def test_a_steady_drift_costs_all_the_same(n_arms: int, pairs: int) -> None:
    arms = [arm(str(i)) for i in range(n_arms)]
    places: dict[str, int] = {a.name: 0 for a in arms}
    for place, (a, _) in enumerate(turns(arms, one_by_one(made([("", True)] * 2 * pairs)))):
        places[a.name] += place
    assert len(set(places.values())) == 1


@given(SESSIONS, SESSIONS, st.integers(1, 5))
def test_parts_keep_together_what_belongs_together(
    first: list[tuple[str, bool]], second: list[tuple[str, bool]], number: int
) -> None:
    prompts = made(first, "v") + made(second, "w")
    parts = in_parts(prompts, number)
    assert len(parts) <= number
    assert all(parts)
    for workload in "vw":
        shares = [[prompt for prompt in part if prompt.workload == workload] for part in parts]
        assert [p for share in shares for p in share] == [p for p in prompts if p.workload == workload]
        for before, after in pairwise([share for share in shares if share]):
            assert before[-1].counted
            assert not after[0].session or after[0].session != before[-1].session


def test_parts_have_about_the_same_share_of_every_workload() -> None:
    prompts = made([("", True)] * 9, "v") + made([("", True)] * 4, "w")
    assert [[p.workload for p in part] for part in in_parts(prompts, 2)] == [list("vvvvvww"), list("vvvvww")]
    assert in_parts([], 2) == []
