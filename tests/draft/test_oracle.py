"""The oracle: it repeats what it has observed, with errors at the configured rate."""

from __future__ import annotations

import pytest

from draft import oracle
from draft.oracle import OracleDrafter
from specdec.core.sequence import Sequence
from specdec.core.types import SamplingParams
from specdec.errors import ConfigError
from tests.draft.helpers import accepted, make_sequence, make_task, propose, replay

GREEDY = SamplingParams(temperature=0.0)
PROMPT, OUTPUT = [1, 2, 3], list(range(100, 500))


def ran(drafter: OracleDrafter, output: list[int] = OUTPUT, prompt: list[int] = PROMPT, **fields: object) -> None:
    """Run a request from start to end that generates ``output``."""
    replay(drafter, make_sequence(prompt, **{"sampling": GREEDY, **fields}), output)


def again(drafter: OracleDrafter, prompt: list[int] = PROMPT, **fields: object) -> Sequence:
    sequence = make_sequence(prompt, **{"sampling": GREEDY, **fields})
    drafter.begin(sequence)
    return sequence


def test_a_new_request_gets_no_draft() -> None:
    drafter = OracleDrafter(1.0)
    assert len(propose(drafter, again(drafter))) == 1


def test_rate_one_is_always_right() -> None:
    drafter = OracleDrafter(1.0)
    ran(drafter)
    assert replay(drafter, make_sequence(PROMPT, sampling=GREEDY), OUTPUT, nodes=15) == 16


def test_rate_zero_is_always_wrong() -> None:
    drafter = OracleDrafter(0.0)
    ran(drafter)
    sequence = again(drafter)
    for token in OUTPUT[:50]:
        tree = propose(drafter, sequence)
        assert len(tree) == 3  # the wrong token and one more behind it
        assert tree.parents == [-1, 0, 1]
        assert tree.tokens[1] != token
        assert tree.tokens[1] in PROMPT
        sequence.tokens.append(token)


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8, 0.95])
def test_the_rate_holds_at_every_position(rate: float) -> None:
    right = first_right = total = 0
    for first in range(4):
        drafter, prompt = OracleDrafter(rate), [first, 2, 3]
        ran(drafter, prompt=prompt)
        sequence = again(drafter, prompt)
        for at, token in enumerate(OUTPUT):
            tree = propose(drafter, sequence)
            total += 1
            first_right += tree.tokens[1] == token
            if accepted(tree, OUTPUT[at:]) >= 2:
                right += 1
            sequence.tokens.append(token)
    assert abs(first_right / total - rate) < 0.04
    assert abs(right / total - rate**2) < 0.05  # positions err independently


def test_runs_are_deterministic_and_requests_differ() -> None:
    def chains(first: int) -> list[list[int]]:
        drafter, prompt = OracleDrafter(0.5), [first, 2, 3]
        ran(drafter, prompt=prompt)
        sequence = again(drafter, prompt)
        out = []
        for token in OUTPUT[:40]:
            out.append(propose(drafter, sequence).tokens)
            sequence.tokens.append(token)
        return out

    assert chains(1) == chains(1)
    assert chains(1) != chains(2)


def test_whether_a_position_is_right_does_not_depend_on_the_step_it_is_proposed_in() -> None:
    drafter = OracleDrafter(0.7)
    ran(drafter)
    sequence = again(drafter)
    held: dict[int, int] = {}
    for at, token in enumerate(OUTPUT[:60]):
        tree = propose(drafter, sequence, nodes=15)
        for position, proposed in enumerate(tree.tokens[1 : accepted(tree, OUTPUT[at:]) + 2], at):
            assert held.setdefault(position, proposed) == proposed
        sequence.tokens.append(token)


def test_the_key_covers_what_determines_the_output() -> None:
    drafter = OracleDrafter(1.0)
    ran(drafter)
    assert len(propose(drafter, again(drafter, seed=9, index=3))) > 1  # greedy: no seed matters
    assert len(propose(drafter, again(drafter, prompt=[1, 2, 4]))) == 1
    assert len(propose(drafter, again(drafter, sampling=SamplingParams(temperature=0.0, top_k=3)))) == 1
    sampled = SamplingParams(temperature=0.7)
    ran(drafter, sampling=sampled, seed=5)
    assert len(propose(drafter, again(drafter, sampling=sampled, seed=5))) > 1
    assert len(propose(drafter, again(drafter, sampling=SamplingParams(temperature=0.7, seed=5), seed=5))) > 1
    assert len(propose(drafter, again(drafter, sampling=sampled, seed=6))) == 1
    assert len(propose(drafter, again(drafter, sampling=sampled, seed=5, index=1))) == 1


def test_after_a_different_output_the_oracle_stops() -> None:
    drafter = OracleDrafter(1.0)
    ran(drafter)
    sequence = again(drafter)
    sequence.tokens += [100, 101, 7]
    assert len(propose(drafter, sequence)) == 1
    sequence.tokens += OUTPUT[3:6]
    assert len(propose(drafter, sequence)) == 1


def test_a_shorter_run_does_not_shorten_the_memory() -> None:
    drafter = OracleDrafter(1.0)
    ran(drafter)
    ran(drafter, OUTPUT[:5])
    assert accepted(propose(drafter, again(drafter), nodes=15), OUTPUT) == 15
    ran(drafter, [100, 7, 8])
    assert propose(drafter, again(drafter), nodes=15).tokens == [3, 100, 7, 8]


def test_a_vocabulary_of_one_known_token_allows_no_wrong_draft() -> None:
    drafter = OracleDrafter(0.0)
    ran(drafter, [5, 5, 5], prompt=[5])
    assert len(propose(drafter, again(drafter, prompt=[5]))) == 1


def test_limits_are_obeyed_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "MAX_OUTPUTS", 3)
    drafter = OracleDrafter(1.0)
    for first in range(3):
        ran(drafter, prompt=[first, 2])
    again(drafter, prompt=[0, 2])  # used last
    ran(drafter, prompt=[3, 2])
    assert [len(propose(drafter, again(drafter, prompt=[first, 2]))) > 1 for first in range(4)] == [
        True,
        False,
        True,
        True,
    ]
    sequence = again(drafter, prompt=[0, 2])
    for nodes, depth in ((0, 5), (1, 5), (9, 4), (5, 0)):
        propose(drafter, sequence, nodes, depth)
    (tree,) = drafter.propose([make_task(sequence, 15, 15, 1, floor=-1e-9)])
    assert len(tree) == 16
    drafter.end(sequence)
    drafter.end(sequence)


def test_names() -> None:
    assert OracleDrafter(0.8).name == "oracle:0.8"
    assert OracleDrafter(1.0).name == "oracle:1"
    for name in ("oracle:0.8", "oracle:0"):
        parsed = OracleDrafter.parse(name)
        assert parsed is not None
        assert parsed.name == name
    assert OracleDrafter.parse("suffix") is None
    for bad in ("oracle:", "oracle:x", "oracle:1.1", "oracle:-0.1", "oracle:nan"):
        with pytest.raises(ConfigError, match="rate"):
            OracleDrafter.parse(bad)
