"""A prompt that ends inside a word: the word is tokenized again, and the plain continuation is still possible."""

from __future__ import annotations

import codecs
import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.core.types import (
    Failed,
    GrammarKind,
    GrammarParams,
    Request,
    ResumeParams,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from specdec.errors import InvalidRequestError
from specdec.grammar import compiler
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.state import any_token
from tests.engine.tiny_engine import finish_of, run_all, text_of, tiny_engine, tiny_parts, tokens_of

TOKENIZER = tiny_parts().tokenizer
VOCAB = tiny_parts().info.vocab_size
GRAMMARS = GrammarCompiler(TOKENIZER, VOCAB)
PROMPT = tuple(TOKENIZER.encode("def add(first, second):\n    return first\n" * 2))
ASCII = tuple(
    t for t in range(VOCAB) if t not in TOKENIZER.special_ids and (b := TOKENIZER.token_bytes(t)) and b.isascii()
)


def make_request(
    name: str, prompt: tuple[int, ...], healing_prefix: str, mode: SpeculationMode, **sampling: float
) -> Request:
    return Request(
        name, prompt, SamplingParams(seed=5, allowed_token_ids=ASCII, **sampling),  # type: ignore[arg-type]
        StoppingParams(max_tokens=20, ignore_eos=True), speculation=SpeculationParams(mode),
        healing_prefix=healing_prefix,
    )  # fmt: skip


@settings(max_examples=30)
@given(
    data=st.data(),
    mode=st.sampled_from([SpeculationMode.OFF, SpeculationMode.ON]),
    temperature=st.sampled_from([0.0, 0.8]),
)
def test_healing_the_same_text_changes_nothing(data: st.DataObject, mode: SpeculationMode, temperature: float) -> None:
    """Without filters: those choose among the tokens that healing allows, which may let in tokens that they excluded
    before."""
    sampling = {"temperature": temperature}
    engine = tiny_engine()
    events = run_all(engine, [make_request("whole", PROMPT, "", SpeculationMode.OFF, **sampling)])
    generated, text = tokens_of(events, "whole"), text_of(events, "whole")
    keep = data.draw(st.integers(0, 12))
    begun = TOKENIZER.decode(generated[:keep])
    typed = data.draw(st.integers(len(begun), min(len(text) - 1, len(begun) + 9)))
    events = run_all(
        engine, [make_request("healed", (*PROMPT, *generated[:keep]), text[len(begun) : typed], mode, **sampling)]
    )
    again = tokens_of(events, "healed")
    assert again[: len(generated) - keep] == generated[keep:]
    assert text_of(events, "healed").startswith(text[typed:])
    assert finish_of(events, "healed").usage.output_tokens == 20


@pytest.mark.parametrize("mode", list(SpeculationMode))
@pytest.mark.parametrize("start", ["x", " retur", "héé\n\n  世", "))) "])
def test_any_prefix_is_healed(start: str, mode: SpeculationMode) -> None:
    request = Request(
        "r", PROMPT, SamplingParams(temperature=0.9, seed=3), StoppingParams(max_tokens=40, ignore_eos=True),
        speculation=SpeculationParams(mode), healing_prefix=start,
    )  # fmt: skip
    events = run_all(tiny_engine(), [request])
    generated = b"".join(TOKENIZER.token_bytes(t) for t in tokens_of(events, "r") if t not in TOKENIZER.special_ids)
    assert generated.startswith(start.encode())
    assert text_of(events, "r") == generated.decode(errors="replace")[len(start) :]


def begins_a_text(data: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return True


@given(text=st.text(min_size=1, max_size=4))
def test_the_mask_has_the_tokens_that_match_the_prefix(text: str) -> None:
    words, start = GRAMMARS.healing(text).mask([]), text.encode()
    for token in range(VOCAB):
        data = b"" if token in TOKENIZER.special_ids else TOKENIZER.token_bytes(token)
        extends = data.startswith(start) and begins_a_text(data[len(start) :])
        assert bool(words[token >> 5] >> (token & 31) & 1) == (extends or bool(data and start.startswith(data)))


def test_positions_along_a_path() -> None:
    start, everything = GRAMMARS.healing("return"), any_token(VOCAB)
    r, e, x = (TOKENIZER.encode(text, add_special=False)[0] for text in ("r", "e", "x"))
    assert (start.mask([r]) == GRAMMARS.healing("eturn").mask([])).all()
    assert not start.mask([x]).any()
    assert not start.mask([r, x, e]).any()
    assert not start.mask([x] * 9).any()
    assert start.commit([r, e]) is start
    assert (start.mask([]) == GRAMMARS.healing("turn").mask([])).all()
    turn = TOKENIZER.encode("turn", add_special=False)
    assert (start.mask([*turn, x]) == everything).all()
    assert start.commit(turn) is None
    assert (start.mask([x]) == everything).all()
    assert sum(int(word).bit_count() for word in everything) == VOCAB


def test_a_special_token_is_no_text() -> None:
    special = min(TOKENIZER.special_ids, key=lambda token: len(TOKENIZER.token_bytes(token)))
    name = TOKENIZER.token_bytes(special).decode()
    spelled = TOKENIZER.encode(name, add_special=False)
    assert special not in spelled
    assert not GRAMMARS.healing(name).mask([special]).any()
    assert not GRAMMARS.healing(name + "x").mask([special]).any()
    assert GRAMMARS.healing(name).commit(spelled) is None


def test_resumed_tokens_begin_with_the_prefix() -> None:
    served = tiny_engine()
    served._grammars.prepare().result()
    asked = make_request("r", PROMPT, "ret", SpeculationMode.OFF, temperature=0.8)
    whole = tokens_of(run_all(served, [asked]), "r")

    def resumed(tokens: list[int]) -> Request:
        seen = ResumeParams(tuple(tokens), numeric_fingerprint=served.info().numeric_fingerprint)
        return dataclasses.replace(asked, resume=seen)

    for size in range(1, 9):
        assert tokens_of(run_all(served, [resumed(whole[:size])]), "r") == whole[size:]
    for other in ("x", "red", "xyzw", "retu"[::-1]):
        with pytest.raises(InvalidRequestError) as caught:
            served.submit(resumed(TOKENIZER.encode(other, add_special=False)))
        assert {v.field for v in caught.value.violations} == {"resume.token_ids"}


def test_the_samples_of_a_request_share_what_takes_long_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    build, built = compiler.healing_matcher, list[str]()

    def counted(start: str, *args: Any) -> Any:
        built.append(start)
        return build(start, *args)

    monkeypatch.setattr(compiler, "healing_matcher", counted)
    served = tiny_engine(dataclasses.replace(tiny_parts(), grammars=None))

    def asked(name: str, start: str) -> Request:
        request = make_request(name, PROMPT, start, SpeculationMode.OFF, temperature=0.9)
        return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, n=4))

    events = run_all(served, [asked("a", " retur"), asked("b", "x")])
    assert sorted(built) == [" retur", "x"]
    for name, start in (("a", " retur"), ("b", "x")):
        for index in range(4):
            text = b"".join(map(TOKENIZER.token_bytes, tokens_of(events, name, index)))
            assert text.startswith(start.encode())


def test_a_satisfied_constraint_costs_nothing() -> None:
    served = tiny_engine()
    served.submit(make_request("r", PROMPT, "ret", SpeculationMode.OFF, temperature=0.0))
    served.step()
    (sequence,) = served._requests.live["r"]
    while sequence.sampling.grammar is not None:
        served.step()
    assert sequence.n_output >= 1


def test_a_prefix_that_no_allowed_token_spells_is_named() -> None:
    x = TOKENIZER.encode("x", add_special=False)[0]
    request = Request("r", PROMPT, SamplingParams(allowed_token_ids=(x,)), healing_prefix="ret")
    (failed,) = (event for event in run_all(tiny_engine(), [request]) if isinstance(event, Failed))
    assert failed.reason == "NO_TOKEN_LEFT"
    assert "allowed_token_ids: none of them spells" in failed.message
    assert "grammar" not in failed.message


@pytest.mark.parametrize(
    "request_", [
        Request("r", (1,), healing_prefix="x" * 257), Request("r", (1,), healing_prefix="\ud800"),
        Request("r", (1,), healing_prefix="x", grammar=GrammarParams(GrammarKind.REGEX, "a+")),
    ],
)  # fmt: skip
def test_an_unhealable_prefix_is_rejected(request_: Request) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tiny_engine().submit(request_)
    assert {v.field for v in caught.value.violations} == {"healing_prefix"}
