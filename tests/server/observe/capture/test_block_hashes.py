"""Hashes reveal the common prefix of two prompts, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.observe.capture import BlockHashes
from specdec.load.arrivals import BLOCK_TOKENS

HASHES = BlockHashes()
IDS = st.lists(st.integers(0, 1 << 20), max_size=3 * BLOCK_TOKENS)


@given(IDS, IDS, IDS)
def test_equal_hashes_count_the_common_whole_blocks(shared: list[int], a: list[int], b: list[int]) -> None:
    first, second = HASHES.of_prompt(shared + a), HASHES.of_prompt(shared + b)
    assert len(first) == len(shared + a) // BLOCK_TOKENS
    common = 0
    while (common + 1) * BLOCK_TOKENS <= min(len(shared + a), len(shared + b)) and (
        (shared + a)[: (common + 1) * BLOCK_TOKENS] == (shared + b)[: (common + 1) * BLOCK_TOKENS]
    ):
        common += 1
    equal = [x == y for x, y in zip(first, second, strict=False)]
    assert equal == [True] * common + [False] * (len(equal) - common)


def test_a_block_hash_depends_on_the_blocks_before() -> None:
    block = list(range(BLOCK_TOKENS))
    assert len(set(HASHES.of_prompt(block * 3))) == 3


def test_hashes_cannot_be_looked_up_without_the_salt() -> None:
    prompt = list(range(BLOCK_TOKENS))
    assert BlockHashes().of_prompt(prompt) != HASHES.of_prompt(prompt)
    assert BlockHashes().of_name("alice") != HASHES.of_name("alice")


def test_names() -> None:
    assert HASHES.of_name("") == ""
    assert HASHES.of_name("a") == HASHES.of_name("a") != HASHES.of_name("b")
    assert HASHES.of_name("\ud800")
