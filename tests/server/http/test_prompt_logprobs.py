"""``echo`` with ``logprobs``: log-probabilities of the prompt, on a real engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from server.engine_process import DEFAULT_FACTORY
from server.http import openai_completions
from server.http.answering import Sample, Totals
from server.http.call import Call
from server.http.openai_completions import scoring_requests
from server.http.openai_format import LegacyLogprobs
from specdec.config import EngineConfig, SpeculationConfig
from specdec.core.types import OutputParams, Request, SamplingParams, StoppingParams, TokenLogprobs
from specdec.models.resolve import load_tokenizer
from tests.models.tiny import make_tiny_model
from tests.server.fake_tokenizer import BOS, FakeTokenizer
from tests.server.http.harness import Server, running

CACHE = Path("~/.cache/specdec").expanduser()
PROMPT = [7, 300, 41, 41, 99, 200, 7, 1, 150, 2, 33]  # an end token in the middle of it ends nothing


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    target = make_tiny_model("llama", tmp_path_factory.mktemp("tiny") / "target")
    engine = EngineConfig(
        target=str(target), threads=1, cache_dir=CACHE, kv_tokens=64 * 20, max_batch=4, max_step_rows=96,
        prefill_chunk=64, max_context=448, speculation=SpeculationConfig(profile_s=0),
    )  # fmt: skip
    with running(lambda: load_tokenizer(str(target), CACHE), factory=DEFAULT_FACTORY, engine=engine) as found:
        yield found


def logprobs(server: Server, **body: Any) -> dict[str, list[Any]]:
    """Of the first choice, streamed and in one piece, which must agree."""
    body = {"logprobs": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **body}
    whole: dict[str, list[Any]] = server.ask(**body)["choices"][0]["logprobs"]
    parts = [chunk["choices"][0]["logprobs"] or {} for chunk in server.stream(**body)[:-1]]
    assert whole == {name: [value for part in parts for value in part.get(name, [])] for name in whole}
    return whole


def test_prompt_logprobs_equal_those_of_generated_tokens(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12}
    made = server.ask(**body, temperature=0, ignore_eos=True, return_token_ids=True)["choices"][0]["token_ids"]
    generated, wanted = logprobs(server, **body), logprobs(server, **body, echo=True)
    echoed = logprobs(server, prompt=[*PROMPT, *made], max_tokens=0, echo=True)
    assert echoed == wanted
    n = len(PROMPT)
    assert [len(values) for values in echoed.values()] == [n + 12] * 4
    for name in ("token_logprobs", "tokens", "top_logprobs"):
        assert echoed[name][n:] == generated[name]
    assert (echoed["token_logprobs"][0], echoed["top_logprobs"][0]) == (None, None)
    assert all(value < 0 for value in echoed["token_logprobs"][1:])
    assert echoed["text_offset"] == sorted(echoed["text_offset"])


def test_long_prompts_are_scored_in_windows(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "echo": True}
    whole = logprobs(server, **body)
    monkeypatch.setattr(openai_completions, "WINDOW", 4)
    assert [len(r.prompt_ids) for r in scoring_requests(Request("r", tuple(PROMPT)))] == [1, 5, 9]
    assert logprobs(server, **body) == whole


def test_windows_are_scored_one_by_one(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of end tokens has a window for each: they never exist all together."""
    original, answered = 0, 0

    async def one_answer(call: Call, requests: Sequence[Request]) -> tuple[list[Sample], Totals]:
        nonlocal answered
        assert original - answered == len(requests) <= 2
        answered += len(requests)
        return [
            Sample(0, i, logprobs=[TokenLogprobs(len(r.prompt_ids), 0.0)]) for i, r in enumerate(requests)
        ], Totals()

    def counted(*args: Any) -> Iterator[Request]:
        nonlocal original
        for request in scoring_requests(*args):
            original += 1
            yield request

    monkeypatch.setattr(openai_completions, "whole_answer", one_answer)
    monkeypatch.setattr(openai_completions, "scoring_requests", counted)
    echoed = server.ask(prompt=[[2] * 40, [2] * 3], max_tokens=0, echo=True, logprobs=0)["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in echoed] == [40, 3]
    assert (original, answered) == (41, 41)


def test_sampling_parameters_do_not_change_prompt_logprobs(server: Server) -> None:
    plain = logprobs(server, prompt=PROMPT, max_tokens=0, echo=True)
    body = {"presence_penalty": 2.0, "logit_bias": {"5": 100.0}, "stop_token_ids": [41], "seed": 3, "temperature": 2}
    assert logprobs(server, prompt=PROMPT, max_tokens=0, echo=True, **body) == plain
    original = Request("r", tuple(PROMPT), SamplingParams(n=3), StoppingParams(stop=("a",)), OutputParams(logprobs=2))
    (found,) = scoring_requests(original)
    assert (found.sampling.n, found.stopping.stop, found.output.logprobs) == (1, (), 2)


def test_one_token_and_several_prompts(server: Server) -> None:
    answer = server.ask(prompt=[[5], PROMPT, PROMPT[:3]], n=2, max_tokens=1, echo=True, logprobs=0)
    lengths = [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]]
    assert lengths == [2, 2, len(PROMPT) + 1, len(PROMPT) + 1, 4, 4]


def test_fill_in_the_middle_has_no_echo_to_score(server: Server) -> None:
    status, error = server.refused(prompt="a", suffix="b", echo=True, logprobs=1)
    assert (status, error["param"]) in ((400, "echo"), (422, "suffix"))


def test_offsets_count_the_special_tokens_that_the_text_has() -> None:
    def offsets(ids: list[int], text: str | None = None, *, skip_special: bool = True) -> list[int]:
        counted = LegacyLogprobs(FakeTokenizer(), skip_special=skip_special)
        first, *rows = [TokenLogprobs(token, -1.0) for token in ids]
        found = counted.rows([first, *rows]) if text is None else counted.prompt(first.token_id, rows, text)
        return found["text_offset"]

    ids = [BOS, *b"a", BOS, *b"bc"]
    assert offsets(ids, "<bos>a<bos>bc") == [0, 5, 6, 11, 12]
    assert offsets(ids, "a<bos>bc") == [0, 0, 1, 6, 7]  # a begin token that the text does not have
    assert offsets(ids, "abc") == offsets(ids) == [0, 0, 1, 1, 2]
    assert offsets(ids, skip_special=False) == [0, 5, 6, 11, 12]
