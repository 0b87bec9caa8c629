"""A thinking budget: the output equals plain decoding that is cut at the budget, closed, and continued."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft.grammar import GrammarDrafter
from specdec.config import EngineConfig, SpeculationConfig
from specdec.control.inputs import Match
from specdec.core.types import (
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    ResumeParams,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
    sample_seed,
)
from specdec.engine.build import build_parts
from specdec.engine.engine import Engine, EngineParts
from specdec.errors import InvalidRequestError
from specdec.models.tokenizer import Tokenizer, TokenizerInfo
from tests.engine.tiny_engine import drain, failures, finish_of, run_all, text_of, tiny_engine, tokens_of
from tests.models.tiny import make_tiny_model

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'].split('</think>')[-1] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{{ '<|im_start|>assistant\\n' }}"
    "{% if thought %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}"
    "{% if open %}{{ '<think>\\n' }}{% endif %}"
)


def add_marks(folder: Path) -> None:
    """Give the tokenizer of a tiny model marks of thoughts."""
    file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    data, known = json.loads(file.read_text()), json.loads(config.read_text())
    free = len(data["model"]["vocab"])
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    data["added_tokens"] += [{"id": free + i, "content": text, **plain} for i, text in enumerate(MARKS)]
    file.write_text(json.dumps(data))
    config.write_text(json.dumps(known | {"chat_template": TEMPLATE}))


MARKS = ("<think>", "</think>")


@functools.cache
def parts() -> EngineParts:
    folder = Path(tempfile.mkdtemp(prefix="specdec-test-"))
    for name, seed in (("target", 0), ("draft", 5)):
        add_marks(make_tiny_model("llama", folder / name, seed=seed))
    return build_parts(
        EngineConfig(
            target=str(folder / "target"), draft=str(folder / "draft"), dtype="int8", threads=2,
            cache_dir=Path("~/.cache/specdec"), kv_tokens=64 * 40, max_batch=8, max_step_rows=96, prefill_chunk=64,
            max_context=448, speculation=SpeculationConfig(
                drafters=("grammar", "suffix", "model"), max_nodes=7, max_depth=5, width=3, profile_s=0
            ),
        )
    )  # fmt: skip


def engine(**changes: Any) -> Engine:
    return tiny_engine(parts(), **changes)


TOKENIZER = parts().tokenizer
assert TOKENIZER.thought_marks is not None
OPENING, END, CLOSING = TOKENIZER.thought_marks
(LINE,) = TOKENIZER.encode_inside("\n")
ENDS = tuple((token, 5.0) for token in TOKENIZER.eos_ids)
TALK = [{"role": "user", "content": "def add(first, second): <think> return first\n" * 3}]
PROMPT = tuple(TOKENIZER.encode_chat(TALK))  # the output may open thoughts
OPEN = tuple(TOKENIZER.encode_chat(TALK, variables={"open": True}))
NUMBERS = parts().info.numeric_fingerprint
GRAMMAR = GrammarParams(GrammarKind.REGEX, "\n?(ab|c d\n)+")


def spent(tokens: list[int], open_: bool) -> int | None:
    """The place of the first token of the thoughts; None: there are none."""
    if open_:
        return 0
    for at, token in enumerate(tokens):
        if token == OPENING:
            return at + 1
        if TOKENIZER.token_bytes(token).strip():
            return None
    return None


def plain(request: Request) -> list[int]:
    """The tokens of one sample by an engine without drafts and without a budget, cut and continued by hand."""
    budget = request.sampling.thinking_budget
    sampling = replace(request.sampling, thinking_budget=-1)
    free = replace(request, sampling=sampling, speculation=SpeculationParams(SpeculationMode.OFF))
    tokens = tokens_of(run_all(engine(), [free]), request.request_id)
    begin = spent(tokens, request.prompt_ids == OPEN)
    if begin is None or END in tokens[begin : begin + budget] or len(tokens) < begin + budget:
        return tokens
    if len(tokens) == begin + budget:
        return tokens  # it ended where the thoughts would have been closed
    head = [*tokens[: begin + budget], *CLOSING][: request.stopping.max_tokens]
    for size in range(begin + budget + 1, len(head) + 1):
        rest = replace(free, resume=ResumeParams(tuple(head[:size]), numeric_fingerprint=NUMBERS))
        try:
            found = tokens_of(run_all(engine(), [rest]), request.request_id)
        except InvalidRequestError:  # the answer ended before the last of them
            return head[: size - 1]
    return head + found


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8, 1.5]),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from(
        [(), ((OPENING, 30.0),), ((OPENING, 30.0), (LINE, 30.0)), ((OPENING, 6.0), (END, 3.0)), ((END, 4.0),), ENDS]
    ),
    seed=st.integers(0, 2**64 - 1),
    thinking_budget=st.integers(0, 14),
)
stoppings = st.builds(
    StoppingParams,
    max_tokens=st.integers(1, 40),
    min_tokens=st.sampled_from([0, 0, 1]),
    stop=st.sampled_from([(), (), ("e", "th")]),
    ignore_eos=st.booleans(),
)
speculations = st.builds(
    SpeculationParams,
    mode=st.sampled_from(list(SpeculationMode)),
    drafters=st.sampled_from([None, ("grammar",), ("suffix",), ("grammar", "model")]),
    max_nodes=st.sampled_from([None, 1, 6, 20]),
    max_depth=st.sampled_from([None, 1, 3, 8]),
    width=st.sampled_from([None, 1, 4]),
)
requests = st.builds(
    Request, request_id=st.just("r"), prompt_ids=st.sampled_from([PROMPT, OPEN]), sampling=samplings,
    stopping=stoppings, speculation=speculations,
)  # fmt: skip


@settings(max_examples=60)
@given(request=requests)
def test_the_output_is_cut_closed_and_continued(request: Request) -> None:
    assert tokens_of(run_all(engine(), [request]), "r") == plain(request)


@settings(max_examples=10)
@given(many=st.lists(requests, min_size=3, max_size=6))
def test_company_and_preemption_change_nothing(many: list[Request]) -> None:
    many = [replace(request, request_id=f"r{i}") for i, request in enumerate(many)]
    served = engine(pages=9)
    for request in many:
        served.submit(request)
    events = [*served.step(), *served.step()]
    served.preempt_newest()
    events += drain(served)
    for request in many:
        assert tokens_of(events, request.request_id) == plain(request)


@settings(max_examples=30)
@given(request=requests, at=st.integers(0, 20))
def test_a_stream_resumes_anywhere(request: Request, at: int) -> None:
    plainly = replace(request, speculation=SpeculationParams(SpeculationMode.OFF))
    whole = tokens_of(run_all(engine(), [plainly]), "r")
    assert tokens_of(run_all(engine(), [request]), "r") == whole
    head = tuple(whole[: min(at, len(whole) - 1)])
    rest = replace(request, resume=ResumeParams(head, numeric_fingerprint=NUMBERS))
    assert [*head, *tokens_of(run_all(engine(), [rest]), "r")] == whole


def make_request(budget: int, prompt: tuple[int, ...] = OPEN, **changes: Any) -> Request:
    sampling = SamplingParams(temperature=0.9, seed=11, thinking_budget=budget, **changes.pop("sampling", {}))
    stopping = changes.pop("stopping", StoppingParams(max_tokens=40, ignore_eos=True))
    return Request("r", prompt, sampling, stopping, **changes)


@pytest.mark.parametrize("prompt", [PROMPT, OPEN], ids=["white space goes before", "the answer ends inside"])
def test_beginnings_and_ends_that_models_hardly_ever_write(prompt: tuple[int, ...]) -> None:
    bias = ((OPENING, 30.0), (LINE, 30.0)) if prompt == PROMPT else ENDS
    met = False
    for seed in range(12):
        sampling = SamplingParams(seed=seed, logit_bias=bias, thinking_budget=9)
        request = Request("r", prompt, sampling, StoppingParams(max_tokens=24))
        found = tokens_of(run_all(engine(), [request]), "r")
        assert found == plain(request)
        met |= found[:2] == [LINE, OPENING] if prompt == PROMPT else len(found) < 9
    assert met


def test_received_tokens_beyond_the_budget_are_refused() -> None:
    free = tokens_of(run_all(engine(), [make_request(-1)]), "r")
    assert END not in free[:8]
    resumed = make_request(4, resume=ResumeParams(tuple(free[:5]), numeric_fingerprint=NUMBERS))
    with pytest.raises(InvalidRequestError, match="does not allow them"):
        engine().submit(resumed)


def test_samples_have_a_budget_each() -> None:
    request = make_request(5, sampling={"n": 3})
    events = run_all(engine(), [request])
    outputs = [tokens_of(events, "r", i) for i in range(3)]
    for i, found in enumerate(outputs):
        alone = replace(request, sampling=replace(request.sampling, n=1, seed=sample_seed(11, i)))
        assert found == plain(alone)
    assert len({tuple(each) for each in outputs}) == 3


def test_the_closing_tokens_take_one_step() -> None:
    def steps(budget: int, drafters: tuple[str, ...]) -> int:
        only = SpeculationParams(SpeculationMode.ON, drafters)
        return finish_of(run_all(engine(), [make_request(budget, speculation=only)]), "r").stats.num_steps

    assert CLOSING[1] == END
    assert steps(6, ("grammar",)) == steps(-1, ()) - len(CLOSING)


def test_drafts_are_made_of_the_closing_tokens_alone() -> None:
    served, drafter, found = engine(), GrammarDrafter(), []
    served.submit(make_request(3, speculation=SpeculationParams(SpeculationMode.OFF)))
    served.step()
    (sequence,) = served._requests.live["r"]
    while sequence.n_output < 3 + len(CLOSING) + 1:
        found.append((sequence.n_output, *drafter.match([sequence])))
        served.step()
    closing = range(3, 3 + len(CLOSING))
    assert found == [(n, Match.STRONG if n in closing else Match.NONE) for n in range(1, closing.stop + 1)]


def test_no_mask_is_made_behind_the_thoughts_and_none_without_a_budget() -> None:
    served = engine()
    served.submit(make_request(3))
    served.step()
    (sequence,) = served._requests.live["r"]
    assert sequence.sampling.grammar is not None
    while sequence.n_output < 3 + len(CLOSING):
        served.step()
    assert sequence.sampling.grammar is None

    answers = SamplingParams(
        0.0, logit_bias=((OPENING, -50.0), (TOKENIZER.token_id("x") or 0, 50.0)), thinking_budget=3
    )
    for name, sampling in (("free", SamplingParams(seed=1)), ("answers", answers)):
        served.submit(Request(name, PROMPT, sampling, StoppingParams(max_tokens=9, ignore_eos=True)))
        (sequence,) = served._requests.live[name]
        while not sequence.n_output:
            assert (sequence.sampling.grammar is None) is (name == "free")
            served.step()
        assert sequence.sampling.grammar is None


@pytest.mark.parametrize("mode", list(SpeculationMode))
def test_with_a_grammar_it_has_no_effect(mode: SpeculationMode) -> None:
    for seed in range(6):
        request = Request(
            "r", OPEN, SamplingParams(seed=seed, thinking_budget=2), StoppingParams(max_tokens=20),
            speculation=SpeculationParams(mode), grammar=GRAMMAR,
        )  # fmt: skip
        free = replace(request, sampling=replace(request.sampling, thinking_budget=-1))
        assert tokens_of(run_all(engine(), [request]), "r") == tokens_of(run_all(engine(), [free]), "r")


def test_a_stop_string_at_the_mark_ends_the_answer() -> None:
    request = make_request(4, stopping=StoppingParams(max_tokens=30, stop=("</think>",), ignore_eos=True))
    events = run_all(engine(), [request])
    assert finish_of(events, "r").matched_stop == "</think>"
    assert len(tokens_of(events, "r")) == 4 + 2


def test_logprobs_of_closing_tokens_are_the_models_own() -> None:
    request = make_request(4, output=OutputParams(logprobs=2))
    found = [entry for e in run_all(engine(), [request]) for entry in getattr(e, "logprobs", ())]
    assert [entry.token_id for entry in found[4:][: len(CLOSING)]] == list(CLOSING)
    assert all(entry.logprob < 0 for entry in found)
    assert any(CLOSING[at] not in [token for token, _ in found[4 + at].top] for at in range(len(CLOSING)))


def test_allowed_tokens_must_hold_the_closing_ones() -> None:
    request = make_request(4, sampling={"allowed_token_ids": (7, 8, END)})
    (failed,) = failures(run_all(engine(), [request]))
    assert failed.reason == "NO_TOKEN_LEFT"
    assert failed.message.startswith("sampling.allowed_token_ids: none of them may follow here, where the thoughts end")
    request = make_request(4, sampling={"allowed_token_ids": (7, 8, *CLOSING)})
    assert tokens_of(run_all(engine(), [request]), "r")[4:][: len(CLOSING)] == list(CLOSING)


def test_a_model_without_marks_ignores_it() -> None:
    request = Request("r", (5, 6, 7), SamplingParams(seed=3, thinking_budget=2), StoppingParams(max_tokens=9))
    free = replace(request, sampling=replace(request.sampling, thinking_budget=-1))
    assert tokens_of(run_all(tiny_engine(), [request]), "r") == tokens_of(run_all(tiny_engine(), [free]), "r")


def test_the_text_shows_the_mark_between_its_line_breaks() -> None:
    assert "\n</think>\n\n" in text_of(run_all(engine(), [make_request(4)]), "r")


@pytest.mark.parametrize(
    ("template", "closing"),
    [
        (TEMPLATE, "\n</think>\n\n"),
        ("{{ c.split('</think>')[-1] }}", "</think>"),
        (r"{{ '<think>\n\n</think>\n\n' }}", "\n</think>\n\n"),
        (r"{{ '\n<think></think>\n' }}", "</think>\n"),
        (None, "</think>"),
    ],
)
def test_line_breaks_are_those_of_the_template(template: str | None, closing: str) -> None:
    info = TokenizerInfo(eos_ids=TOKENIZER.eos_ids, chat_template=template)
    text = TOKENIZER._backend.to_str()
    other = Tokenizer(text, TokenizerInfo(chat_template=r"{{ '\n</think>' }}"))
    assert other.thought_marks == (OPENING, END, (LINE, END))
    marks = other.with_info(info).thought_marks  # shares the vocabulary
    assert marks is not None
    assert b"".join(map(TOKENIZER.token_bytes, marks[2])) == closing.encode()


@pytest.mark.parametrize(("opening", "end"), [("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")])
def test_marks_of_other_families(opening: str, end: str) -> None:
    text = TOKENIZER._backend.to_str().replace('"</think>"', f'"{end}"').replace('"<think>"', f'"{opening}"')
    other = Tokenizer(text, TokenizerInfo(chat_template=f"{{{{ '\\n{end}' }}}}"))
    assert other.thought_marks == (OPENING, END, (LINE, END))


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\nSo far, so", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_whether_the_prompt_leaves_thoughts_open(text: str, is_open: bool) -> None:
    assert TOKENIZER.leaves_thoughts_open(TOKENIZER.encode(text, parse_special=True)) is is_open
