"""Masks against trying every token, on any path, in any order; forced tokens; tokens after the end."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from specdec.core.types import GrammarKind, GrammarParams
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.state import GrammarState
from specdec.models.tokenizer import Tokenizer, TokenizerInfo
from tests.grammar.helpers import (
    EOS,
    GRAMMARS,
    PERSON,
    allowed_by_trial,
    byte_level,
    check_mask,
    compiled,
    compiler,
    finished,
    ids_of,
    sentence_piece,
    start,
)
from tests.models.tiny import VOCAB_SIZE

CHOICES = ["a", "an", "and so on", "über", ""]


def text_of(tokens: list[int]) -> bytes:
    return b"".join(byte_level().token_bytes(token) for token in tokens if token != EOS)


def wander(state: GrammarState, rng: random.Random, steps: int, path: tuple[int, ...] = ()) -> list[int]:
    """``path`` and up to ``steps`` random allowed tokens more."""
    way = list(path)
    for _ in range(steps):
        allowed = ids_of(state.mask(way))
        if not allowed:
            break
        way.append(rng.choice(allowed))
    return way


@pytest.mark.parametrize("params", GRAMMARS, ids=lambda p: f"{p.kind}:{p.text[:12]}")
@pytest.mark.parametrize("seed", [1, 2])
def test_a_mask_equals_trying_every_token(params: GrammarParams, seed: int) -> None:
    rng, state = random.Random(seed), start(params)
    way = wander(start(params), rng, 9)
    for cut in range(seed - 1, len(way) + 1, 4):
        mask, possible = ids_of(state.mask(way[:cut])), allowed_by_trial(params, way[:cut])
        check_mask(mask, possible, state.forced(way[:cut], 1), byte_level())


@pytest.mark.parametrize("vocab_size", [352, 376, 377, 384, 415, 416])
def test_no_token_beyond_the_vocabulary_is_allowed(vocab_size: int) -> None:
    mask = start(GrammarParams(GrammarKind.REGEX, "(?s:.*)"), vocab_size).mask(())
    assert mask.dtype == np.uint32
    assert mask.shape == (-(-vocab_size // 32),)
    assert max(ids_of(mask)) < min(vocab_size, byte_level().vocab_size)  # padding ids are no text
    assert EOS in ids_of(mask)
    assert not {0, 1} & set(ids_of(mask))  # special tokens neither


def test_choices_by_their_text_alone() -> None:
    state = start(GrammarParams(GrammarKind.CHOICE, json.dumps(CHOICES)))
    for path in ([], byte_level().encode("a"), byte_level().encode("and "), byte_level().encode("über")[:1]):
        text = text_of(path)
        can_end = [EOS] if text.decode(errors="replace") in CHOICES else []
        expected = [
            token
            for token in range(3, byte_level().vocab_size)
            if any(choice.encode().startswith(text + byte_level().token_bytes(token)) for choice in CHOICES)
        ]
        check_mask(ids_of(state.mask(path)), can_end + expected, state.forced(path, 1), byte_level())


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(GRAMMARS), st.randoms(use_true_random=False), st.data())
def test_any_walk_over_the_tree_gets_the_masks_of_a_fresh_state(
    params: GrammarParams, rng: random.Random, data: st.DataObject
) -> None:
    state, output = start(params), []
    for _ in range(data.draw(st.integers(1, 3))):
        for _ in range(data.draw(st.integers(0, 5))):
            path = wander(state, rng, rng.randrange(4), tuple(wander(state, rng, rng.randrange(3))))
            if rng.random() < 0.4:
                path.insert(rng.randrange(len(path) + 1), rng.choice([EOS, 0, -1, 10**7, rng.randrange(VOCAB_SIZE)]))
            fresh = start(params)
            fresh.commit(output)
            assert ids_of(state.mask(path)) == ids_of(fresh.mask(path))
            assert state.forced(path, 5) == fresh.forced(path, 5)
        taken = wander(state, rng, rng.randrange(4))
        state.commit(taken)
        output += taken
    replayed = start(params)
    assert ids_of(state.mask(())) == ids_of(replayed.mask(output))


@pytest.mark.parametrize(
    "rule",
    [
        '"let " WORD " = " WORD start? | "call(" WORD ")" start?',
        '/[xy]/ " quick " ("the " WORD "=" | "dog " WORD "!") start?',  # parts where text is forced
        '"so " ("the " WORD "=" | "dog " WORD "!") start?',  # forced from the output's start
    ],
)
def test_paths_of_as_many_lexemes_have_masks_of_their_own(rule: str) -> None:
    """The library keeps its last mask, also for another path on which it read as many lexemes."""
    params, rng = GrammarParams(GrammarKind.EBNF, f"start: {rule}\nWORD: /[a-z]+/"), random.Random(4)
    for _ in range(20):
        state = start(params)
        output: list[int] = []
        for _ in range(8):
            path = wander(state, rng, 7)
            assert ids_of(state.mask(path)) == ids_of(start(params).mask([*output, *path])), text_of(path)
            if rng.random() < 0.3:
                taken = path[: rng.randrange(4)]
                output += taken
                state.commit(taken)


def test_paths_that_part_after_named_tokens_have_the_masks_of_a_fresh_state() -> None:
    """The library rolls back over a named token by the bytes of its text, not of its number."""
    for params in (each for each in GRAMMARS if "<" in each.text):
        state, way = start(params), wander(start(params), random.Random(2), 5)
        for cut in (len(way), 0, 2, 1, len(way) - 1):
            assert ids_of(state.mask(way[:cut])) == ids_of(start(params).mask(way[:cut]))


def test_a_path_off_the_grammar_has_an_empty_mask_and_changes_no_state() -> None:
    params = GrammarParams(GrammarKind.CHOICE, '["hello"]')
    state, hello = start(params), byte_level().encode("hello")
    for garbage in ([5], [hello[0], 5, 6], [-1], [10**7], [VOCAB_SIZE - 1], [EOS], [*hello, EOS, 5], [*hello, 5]):
        assert ids_of(state.mask(garbage)) == []
        assert state.forced(garbage, 3) == []
        assert ids_of(state.mask(())) == ids_of(start(params).mask(())) != []
    state.commit([5])  # cannot result from this state's own masks
    assert ids_of(state.mask(())) == []
    state.commit([6])
    assert not finished(state)


def test_a_limit_reached_by_a_draft_does_not_persist() -> None:
    params = GRAMMARS[0]
    state = start(params)
    way = wander(start(params), random.Random(3), 6)
    state.commit(way[:3])
    expected = ids_of(start(params).mask(way))
    state._matcher.consume_token(10**7)  # an error the library's matcher never leaves
    assert ids_of(state.mask(way[3:])) == expected
    assert state.error
    state._matcher.consume_token(10**7)
    assert state.forced((), 3) == start(params).forced(way[:3], 3)


def test_the_error_of_a_grammar_without_an_end_is_one_plain_line() -> None:
    state = start(GrammarParams(GrammarKind.EBNF, 'root ::= "a" root'))
    state.commit(byte_level().encode("a"))
    assert state.error.startswith("parser error: Too many items")
    assert "\n" not in state.error
    assert "<" not in state.error


def test_a_text_that_the_vocabulary_cannot_spell_is_an_error_in_words() -> None:
    pieces = {"<s>": 0, "<unk>": 1, "</s>": EOS, **{"a" * n: n + 2 for n in range(1, 300)}}
    backend = Backend(models.BPE(pieces, [], unk_token="<unk>"))
    letters = GrammarCompiler(Tokenizer(backend.to_str(), TokenizerInfo(eos_ids=(EOS,))), 302)
    state = compiled(letters, GrammarParams(GrammarKind.REGEX, "ab"))
    state.commit([3])
    assert ids_of(state.mask(())) == []
    assert state.error == "no token of the model may follow"


def test_after_an_end_token_only_end_tokens_follow() -> None:
    state = start(GrammarParams(GrammarKind.REGEX, "[ab]+"))
    a = byte_level().encode("a")
    assert EOS in ids_of(state.mask(a))
    for _ in range(2):
        assert ids_of(state.mask([*a, EOS])) == [EOS] == ids_of(state.mask([*a, EOS, EOS]))
        assert ids_of(state.mask([*a, EOS, *a])) == []
        assert set(a) <= set(ids_of(state.mask(a)))  # looking beyond the end does not end it
    state.commit(a)
    assert not finished(state)
    state.commit([EOS])
    assert ids_of(state.mask(())) == [EOS] == ids_of(state.mask([EOS]))
    assert ids_of(state.mask(a)) == []
    assert state.forced((), 4) == []


def test_a_complete_text_allows_only_the_end_token() -> None:
    state = start(GrammarParams(GrammarKind.CHOICE, '["yes"]'))
    state.commit(byte_level().encode("yes"))
    assert ids_of(state.mask(())) == [EOS]
    assert state.forced((), 4) == [EOS]


def test_forced_tokens_equal_the_forced_text() -> None:
    params = GrammarParams(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))
    state = start(params)
    assert text_of(state.forced((), 50)) == b'{"kind":"pe'
    opening = byte_level().encode('{"kind":"pet')
    chain = state.forced(opening, 50)
    assert text_of(chain) in b'","name":"'
    assert len(text_of(chain)) >= len(b'","name":')  # the quote may be one token with the name's start
    assert state.forced(opening, 2) == chain[:2]
    assert state.forced(opening, 0) == []
    ending = [*opening, *byte_level().encode('","name":"bob","age":99')]
    chain = state.forced(ending, 50)
    assert text_of(chain) == b"}"
    assert chain[-1] == EOS
    for way in ([], opening, ending):
        chain = state.forced(way, 50)
        assert [ids_of(state.mask([*way, *chain[:at]])) for at in range(len(chain))] == [[token] for token in chain]


def test_n_samples_of_one_grammar_have_independent_states() -> None:
    params = GrammarParams(GrammarKind.CHOICE, '["left", "right"]')
    left, right = start(params), start(params)
    left.commit(byte_level().encode("left"))
    right.commit(byte_level().encode("ri"))
    assert finished(left)
    assert text_of(right.forced((), 9)) == b"ght"


@pytest.mark.parametrize("text", ['["and an", "and é"]', '["and"]', '[" and", "{1:a}"]'])
def test_a_tokenizer_that_adds_a_space_before_texts(text: str) -> None:
    """Two tokens may hold the same bytes (a character's, and one per byte): both are allowed."""
    params = GrammarParams(GrammarKind.CHOICE, text)
    tokenizer, size = sentence_piece(), sentence_piece().vocab_size
    state, rng = compiled(compiler(size, pieces=True), params), random.Random(1)
    for _ in range(4):
        way = wander(state, rng, 3)
        possible = allowed_by_trial(params, way, size, pieces=True)
        check_mask(ids_of(state.mask(way)), possible, state.forced(way, 1), tokenizer)
    forced = state.forced((), 9)
    written = b"".join(tokenizer.token_bytes(token) for token in forced if token != EOS).decode()
    assert any(choice.startswith(written) for choice in json.loads(text))
    assert len(json.loads(text)) > 1 or (written == "and" and len(forced) == 2)
