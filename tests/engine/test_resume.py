"""An interrupted stream resumes on another engine: the resumed and the new tokens equal an uninterrupted answer."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.core.types import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    ResumeParams,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    Started,
    StoppingParams,
    TextRules,
)
from specdec.errors import FingerprintMismatchError, InvalidRequestError
from tests.engine.test_text_rules import layout_bias
from tests.engine.tiny_engine import drain, finish_of, run_all, text_of, tiny_engine, tiny_parts, tokens_of

TOKENIZER = tiny_parts().tokenizer
PROMPT = tuple(TOKENIZER.encode("def add(first, second):\n    return first\n" * 3))
NUMBERS = tiny_parts().info.numeric_fingerprint
SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}}}'
)
GRAMMARS = (
    None,
    GrammarParams(GrammarKind.JSON_SCHEMA, SCHEMA),
    GrammarParams(GrammarKind.REGEX, "(ab|c d\n)+"),
    GrammarParams(GrammarKind.CHOICE, '["return first", "return second", "return nothing at all"]'),
)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from([(), layout_bias()]),
    seed=st.integers(0, 2**64 - 1),
)
rules = st.builds(
    TextRules,
    max_lines=st.none() | st.integers(2, 4),
    min_indent=st.none() | st.integers(1, 3),
    closers=st.none() | st.sampled_from(["", ")"]),
    suffix=st.sampled_from(["", "\n x(x"]),
)
stoppings = st.builds(
    StoppingParams,
    max_tokens=st.integers(1, 40),
    min_tokens=st.sampled_from([0, 0, 1]),
    stop=st.sampled_from([(), ("a",), ("th", "(x", "\n \n)")]),
    stop_token_ids=st.sampled_from([(), (3, 77)]),
    include_stop=st.booleans(),
    ignore_eos=st.booleans(),
    rules=st.none() | rules,
)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    grammar = draw(st.sampled_from(GRAMMARS))
    return Request(
        "r",
        PROMPT,
        draw(samplings),
        draw(stoppings),
        OutputParams(logprobs=draw(st.sampled_from([None, 2])), skip_special_tokens=draw(st.booleans())),
        prediction_ids=draw(st.sampled_from([(), PROMPT[:20]])),
        grammar=grammar,
        healing_prefix="" if grammar else draw(st.sampled_from(["", "re", " retu"])),
    )


def deltas_of(events: list[Any]) -> list[Delta]:
    return [event for event in events if isinstance(event, Delta)]


def resumed(request: Request, tokens: list[int], characters: int | None) -> Request:
    return replace(request, resume=ResumeParams(tuple(tokens), characters, NUMBERS))


@settings(max_examples=120)
@given(
    request=requests(),
    modes=st.tuples(*[st.sampled_from(SpeculationMode)] * 2),
    cut=st.floats(0, 1),
    between_steps=st.booleans(),
)
def test_resumed_and_new_tokens_equal_the_whole_answer(
    request: Request, modes: tuple[SpeculationMode, SpeculationMode], cut: float, between_steps: bool
) -> None:
    """Interrupted after any token, as a step without drafts may end, or at the end of an actual step; started and
    resumed with and without speculation."""
    request = replace(request, speculation=SpeculationParams(modes[0]))
    whole = run_all(tiny_engine(), [request])
    tokens, text, end = tokens_of(whole, "r"), text_of(whole, "r"), finish_of(whole, "r")
    rows = [row for delta in deltas_of(whole) for row in delta.logprobs]
    if between_steps:
        came = deltas_of(whole)[: round(cut * len(deltas_of(whole)))]
        had, characters = [token for delta in came for token in delta.token_ids], sum(len(delta.text) for delta in came)
    else:
        had, characters = tokens[: round(cut * len(tokens))], 0
    again = replace(resumed(request, had, characters), speculation=SpeculationParams(modes[1]))
    rest = run_all(tiny_engine(), [again])
    assert had + tokens_of(rest, "r") == tokens
    assert text[:characters] + text_of(rest, "r") == text
    assert [row for delta in deltas_of(rest) for row in delta.logprobs] == (rows[len(had) :] if rows else [])
    other = finish_of(rest, "r")
    assert (other.reason, other.matched_stop) == (end.reason, end.matched_stop)
    assert (other.usage.output_tokens, other.usage.prompt_tokens) == (len(tokens), len(PROMPT))
    assert other.usage.resumed_tokens == len(had)


def test_the_text_of_resumed_tokens_is_not_sent_again() -> None:
    request = Request("r", PROMPT, SamplingParams(seed=4), StoppingParams(max_tokens=24, stop=("zzzz",)))
    whole = run_all(tiny_engine(), [request])
    came = deltas_of(whole)[:11]
    had = [token for delta in came for token in delta.token_ids]
    rest = run_all(tiny_engine(), [resumed(request, had, None)])
    assert "".join(delta.text for delta in came) + text_of(rest, "r") == text_of(whole, "r")
    (started,) = [event for event in rest if isinstance(event, Started)]
    assert (started.seed, started.prompt_tokens, started.resumed_tokens) == (4, len(PROMPT), len(had))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_prompts_of_equal_length_are_distinguished(length: int, prefix_cache: bool) -> None:
    prompt, digests = tuple(range(1, length + 1)), []
    request = Request("r", prompt, SamplingParams(seed=4), StoppingParams(max_tokens=70, ignore_eos=True))
    engine = tiny_engine(prefix_cache=prefix_cache)
    had = tokens_of(run_all(engine, [request]), "r")[:66]
    for asked in (
        request,
        resumed(request, had, None),
        replace(request, prompt_ids=(99, *prompt[1:])),
        replace(request, prompt_ids=(*prompt[:-1], 98)),
    ):
        digests += [event.prompt_digest for event in run_all(engine, [asked]) if isinstance(event, Started)]
    assert len(digests) == 4
    assert digests[0] == digests[1] != digests[2] != digests[3] != digests[0]


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP_STRING, FinishReason.EOS])
def test_an_answer_without_remaining_tokens_ends_without_a_step(reason: FinishReason) -> None:
    eos = TOKENIZER.eos_ids[0]
    bias = ((eos, 1000.0),) if reason is FinishReason.EOS else ()
    stop = ("e",) if reason is FinishReason.STOP_STRING else ()
    stopping = StoppingParams(max_tokens=9, min_tokens=3, stop=stop, ignore_eos=reason is FinishReason.LENGTH)
    request = Request("r", PROMPT, SamplingParams(seed=1, logit_bias=bias), stopping)
    if reason is FinishReason.STOP_STRING:
        request = replace(request, stopping=replace(stopping, max_tokens=200))
    whole = run_all(tiny_engine(), [request])
    assert finish_of(whole, "r").reason is reason
    engine = tiny_engine()
    tokens, text = tokens_of(whole, "r"), text_of(whole, "r")
    for characters, rest in ((len(text), ""), (len(text) - 1, text[-1:])):
        engine.submit(resumed(request, tokens, characters))
        assert engine.has_work()
        events = engine.step()
        assert engine.last_step is None
        assert [type(event) for event in events] == [Started, *([Delta] if rest else []), Finished]
        assert text_of(events, "r") == rest
        assert finish_of(events, "r").reason is reason
    assert not engine.has_work()


def test_an_answer_that_filled_the_context_ends() -> None:
    request = Request("r", PROMPT, SamplingParams(seed=1), StoppingParams(ignore_eos=True))
    context = len(PROMPT) + 30
    parts = tiny_parts()
    parts = dataclasses.replace(parts, info=dataclasses.replace(parts.info, max_context=context))
    tokens = tokens_of(run_all(tiny_engine(parts), [request]), "r")
    assert len(PROMPT) + len(tokens) == context
    for had in (29, 30):
        rest = run_all(tiny_engine(parts), [resumed(request, tokens[:had], None)])
        assert tokens_of(rest, "r") == tokens[had:]
        assert finish_of(rest, "r").reason is FinishReason.LENGTH


def test_cached_tokens_count_the_prompts_only() -> None:
    engine, request = tiny_engine(), Request("r", PROMPT, SamplingParams(seed=1), StoppingParams(max_tokens=30))
    tokens = tokens_of(run_all(engine, [request]), "r")
    usage = finish_of(run_all(engine, [resumed(request, tokens[:-1], None)]), "r").usage
    assert usage.cached_tokens == usage.prompt_tokens == len(PROMPT)


def test_a_request_interrupted_twice_and_preempted_is_complete() -> None:
    request = Request("r", PROMPT, SamplingParams(seed=8, frequency_penalty=0.5), StoppingParams(max_tokens=40))
    whole = run_all(tiny_engine(), [request])
    had: list[int] = []
    text = ""
    for most in (13, 29, 99):
        engine = tiny_engine()
        engine.submit(resumed(request, had, len(text)) if had else request)
        while engine.has_work() and len(had) < most:
            for delta in deltas_of(engine.step()):
                had, text = [*had, *delta.token_ids], text + delta.text
            engine.preempt_newest()
        engine.close()
    assert (had, text) == (tokens_of(whole, "r"), text_of(whole, "r"))


def refused(request: Request) -> list[tuple[str, str]]:
    """The refusal's violations, whether `submit` raises it or a grammar had to compile first."""
    engine = tiny_engine()
    try:
        engine.submit(request)
    except InvalidRequestError as error:
        assert not engine.has_work()
        return error.details
    (failed,) = drain(engine)
    assert isinstance(failed, Failed)
    assert failed.reason == InvalidRequestError.reason
    return failed.details


def test_an_impossible_state_is_rejected_by_its_field() -> None:
    base = Request("r", PROMPT, SamplingParams(seed=1), StoppingParams(max_tokens=30, ignore_eos=True))
    tokens = tokens_of(run_all(tiny_engine(), [base]), "r")
    vocab = tiny_parts().info.vocab_size
    assert refused(resumed(base, [vocab], None)) == [("resume.token_ids", f"ids must lie in [0, {vocab})")]
    (problem,) = refused(resumed(base, tokens + tokens, None))
    assert problem == ("resume.token_ids", "are 60, more than max_tokens (30), which counts them too")
    (problem,) = refused(resumed(base, tokens[:5], 4000))
    assert problem[0] == "resume.text_characters"
    assert "characters so far, not 4000" in problem[1]
    stopped = replace(base, stopping=replace(base.stopping, stop_token_ids=(tokens[3],)))
    (problem,) = refused(resumed(stopped, tokens, None))
    assert problem[0] == "resume.token_ids"
    assert problem[1].startswith(f"the answer ends at token {tokens.index(tokens[3]) + 1} of them (stop_token)")
    grammar = replace(base, grammar=GrammarParams(GrammarKind.CHOICE, '["one", "two"]'))
    (problem,) = refused(resumed(grammar, tokens[:4], None))
    assert problem[0] == "resume.token_ids"
    assert problem[1].startswith("the grammar does not allow them")
    several = replace(base, sampling=SamplingParams(n=2))
    assert [field for field, _ in refused(resumed(several, tokens[:4], None))] == ["sampling.n", "sampling.seed"]
    unlimited = replace(base, stopping=StoppingParams(ignore_eos=True))
    (problem,) = refused(resumed(unlimited, tokens * 20, None))
    assert problem == ("resume.token_ids", f"with the prompt are {len(PROMPT) + 600}, more than the context of 448")


def test_another_fingerprint_is_rejected_with_the_difference() -> None:
    parts = tiny_parts()
    ours = "00000000111111112222222233333333"
    parts = dataclasses.replace(parts, info=dataclasses.replace(parts.info, numeric_fingerprint=ours))
    request = Request("r", PROMPT, SamplingParams(seed=1))
    for theirs, difference in (
        ("00000000111111110222222233333333", "what differs: kernels or processor;"),
        ("f0000000111111112222222233333334", "what differs: weights, release;"),
        ("f00", "no such server made it;"),
        ("", "it is missing: send that of the stream's Started;"),
    ):
        with pytest.raises(FingerprintMismatchError, match=difference) as caught:
            tiny_engine(parts).submit(replace(request, resume=ResumeParams((5,), 0, theirs)))
        assert ours in str(caught.value)
