"""`specdec generate`, here and on a server, with the fake engine under both."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specdec.cli import generate
from specdec.cli.main import cli
from specdec.cli.runners import LocalRunner
from specdec.config import EngineConfig
from specdec.core.types import (
    Delta,
    EngineInfo,
    Finished,
    FinishReason,
    GrammarKind,
    GrammarParams,
    Request,
    RequestEvent,
    SpeculationStats,
    Timings,
    Usage,
)
from specdec.errors import EngineDeadError, ModelError
from tests.fake_engine import DEFAULT_SEED, FakeEngine
from tests.server.fake_tokenizer import BOS, FakeTokenizer
from tests.server.harness import running_server

Invoke = Callable[..., Result]


class SpyEngine(FakeEngine):
    """Records its calls, and acts on the third step."""

    def __init__(self, on_third_step: Exception | KeyboardInterrupt | None = None) -> None:
        super().__init__(EngineConfig(target="fake"))
        self.requests: list[Request] = []
        self.aborted: list[bool] = []
        self._steps = 0
        self._on_third_step = on_third_step

    def submit(self, request: Request, waited_s: float = 0.0) -> None:
        self.requests.append(request)
        super().submit(request, waited_s)

    def abort(self, request_id: str) -> bool:
        self.aborted.append(super().abort(request_id))
        return self.aborted[-1]

    def step(self) -> list[RequestEvent]:
        self._steps += 1
        if self._steps == 3 and self._on_third_step is not None:
            raise self._on_third_step
        return super().step()


@pytest.fixture
def run_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[SpyEngine], Invoke]:
    """Invokes `specdec generate` in process, on the engine given."""

    def use(engine: SpyEngine) -> Invoke:
        @contextmanager
        def runner(config: EngineConfig) -> Iterator[LocalRunner]:
            yield LocalRunner(engine, FakeTokenizer())

        monkeypatch.setattr(generate, "_local_runner", runner)
        return lambda *args, **kwargs: CliRunner().invoke(cli, ["generate", *args], **kwargs)

    return use


def test_text_streams_to_standard_output(run_on: Callable[[SpyEngine], Invoke]) -> None:
    engine = SpyEngine()
    result = run_on(engine)("hello")
    assert (result.exit_code, result.stdout) == (0, chr(BOS) + "hello\n")
    assert engine.requests[0].sampling.temperature == 0.0
    assert engine.aborted == [False]  # it was complete


def test_the_prompt_may_come_from_standard_input_or_be_a_chat(run_on: Callable[[SpyEngine], Invoke]) -> None:
    assert run_on(SpyEngine())("-", input="piped\n").stdout == chr(BOS) + "piped\n"
    assert run_on(SpyEngine())("--chat", "hi").stdout == "user:hi;\n"


@pytest.mark.parametrize("flag", ["--json-schema", "--ebnf"])
def test_a_missing_grammar_file_is_reported_as_missing(run_on: Callable[[SpyEngine], Invoke], flag: str) -> None:
    result = run_on(SpyEngine())("hello", flag, "missing.txt")
    assert result.exit_code == 2
    assert result.stderr.endswith(f"Error: {flag}: no such file: missing.txt\n")


class InterruptedEngine(SpyEngine):
    """Gets Ctrl-C while it computes the first request's first text."""

    def step(self) -> list[RequestEvent]:
        events = super().step()
        if len(self.requests) == 1 and any(isinstance(event, Delta) for event in events):
            signal.raise_signal(signal.SIGINT)
        return events


def test_chat_keeps_the_conversation_and_changes_the_mode(run_on: Callable[[SpyEngine], Invoke]) -> None:
    engine = SpyEngine()
    run_on(engine)
    words = ["chat", "--system", "be brief"]
    result = CliRunner().invoke(cli, words, input="hi\n/off\nmore\n/clear\n/nonsense\nnew\n")
    assert result.exit_code == 0, result.output
    assert "drafted accepted" in result.stderr
    answers = result.stdout.splitlines()
    assert answers[0] == "system:be brief;user:hi;"
    assert answers[1] == f"system:be brief;user:hi;assistant:{answers[0]};user:more;"
    assert answers[2] == "system:be brief;user:new;"
    modes = [request.speculation.mode for request in engine.requests]
    assert modes == ["auto", "off", "off"]
    assert len({request.session for request in engine.requests}) == 1
    assert len({request.request_id for request in engine.requests}) == 3


def test_ctrl_c_stops_an_answer_of_a_chat_and_not_the_chat(run_on: Callable[[SpyEngine], Invoke]) -> None:
    engine = InterruptedEngine()
    run_on(engine)
    result = CliRunner().invoke(cli, ["chat"], input="hello\nagain\n")
    assert result.exit_code == 0, result.output
    assert engine.aborted == [True, False]
    assert "[stopped]" in result.stderr
    stopped, whole = result.stdout.splitlines()
    assert "user:hello;".startswith(stopped)
    assert whole == f"user:hello;assistant:{stopped};user:again;"


class LostEngine(SpyEngine):
    """Can not be reached when the second request comes."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0

    def submit(self, request: Request, waited_s: float = 0.0) -> None:
        if len(self.requests) == 1 and not self.failures:
            self.failures += 1
            raise ModelError("no server answers")
        super().submit(request, waited_s)

    def info(self) -> EngineInfo:
        if len(self.requests) == 1 and not self.failures:
            raise ModelError("no server answers")
        return super().info()


def test_a_chat_survives_a_server_that_is_away_for_a_while(run_on: Callable[[SpyEngine], Invoke]) -> None:
    run_on(LostEngine())
    result = CliRunner().invoke(cli, ["chat"], input="hi\nlost\nagain\n")
    assert result.exit_code == 0, result.output
    assert "Error: no server answers" in result.stderr
    assert result.stdout.splitlines() == ["user:hi;", "user:hi;assistant:user:hi;;user:again;"]


def test_a_chat_survives_a_line_that_is_not_utf_8(run_on: Callable[[SpyEngine], Invoke]) -> None:
    engine = SpyEngine()
    run_on(engine)
    result = CliRunner().invoke(cli, ["chat"], input=b"hi\n\xff\nagain\n")
    assert result.exit_code == 0, result.output
    assert "Error: the line is not valid UTF-8" in result.stderr
    assert len(engine.requests) == 2
    assert "--n: a conversation goes on from one answer" in CliRunner().invoke(cli, ["chat", "--n", "2"]).stderr
    refused = CliRunner().invoke(cli, ["chat", "--system", "\udcff"])
    assert (refused.exit_code, "--system is not valid UTF-8" in refused.stderr) == (2, True)


def test_every_option_reaches_the_request(run_on: Callable[[SpyEngine], Invoke]) -> None:
    engine = SpyEngine()
    flags = (
        "--max-tokens 3 --min-tokens 1 --temperature 0.5 --top-k 4 --top-p 0.75 --min-p 0.25 --repetition-penalty 1.5 "
        "--presence-penalty 0.125 --frequency-penalty 0.5 --seed 18446744073709551615 --n 2 --stop a --stop b "
        "--ignore-eos --logprobs 3 --speculation on --drafter suffix,model --max-nodes 5 --max-depth 4 --width 1 "
        "--timeout 9 --json --draft d --prediction later --session editor-1 --target-tpot-ms 12.5 --json-object"
    )
    result = run_on(engine)("hello", *flags.split())
    assert result.exit_code == 3, result.output  # the JSON object was cut
    assert "cut at 3 tokens; --max-tokens" in result.stderr
    (r,) = engine.requests
    s = r.sampling
    assert (s.temperature, s.top_k, s.top_p, s.min_p) == (0.5, 4, 0.75, 0.25)
    assert (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) == (1.5, 0.125, 0.5)
    assert (s.seed, s.n) == (2**64 - 1, 2)
    stop = r.stopping
    assert (stop.max_tokens, stop.min_tokens, stop.stop, stop.ignore_eos) == (3, 1, ("a", "b"), True)
    spec = r.speculation
    assert (spec.mode, spec.drafters, spec.max_nodes, spec.max_depth, spec.width) == (
        "on", ("suffix", "model"), 5, 4, 1,
    )  # fmt: skip
    assert (r.output.logprobs, r.deadline_s) == (3, 9.0)
    assert (r.prediction_ids, r.session, r.target_tpot_ms) == (tuple(b"later"), "editor-1", 12.5)
    assert r.grammar == GrammarParams(GrammarKind.JSON_OBJECT)


def test_omitted_options_are_unset(run_on: Callable[[SpyEngine], Invoke]) -> None:
    engine = SpyEngine()
    assert run_on(engine)("hello").exit_code == 0
    (r,) = engine.requests
    assert (r.prediction_ids, r.session, r.target_tpot_ms, r.grammar) == ((), "", None, None)


def test_texts_can_be_read_from_files(run_on: Callable[[SpyEngine], Invoke], tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"a\r\nb\n")
    engine = SpyEngine()
    invoke = run_on(engine)
    for args in (
        ["--prediction-file", str(file)],
        ["--json-schema", str(file)],
        ["--json-schema", "{}" * 3000],
        ["--ebnf", str(file)],
        ["--ebnf", 'start: "a"'],
        ["--regex", str(file)],
        ["--choice", "yes", "--choice", '"no"\n'],
    ):
        assert invoke("x", *args).exit_code in (0, 3)  # 3: cut by a grammar
    prediction, *grammars = engine.requests
    assert prediction.prediction_ids == tuple(b"a\r\nb\n")
    assert [r.grammar for r in grammars] == [
        GrammarParams(GrammarKind.JSON_SCHEMA, "a\r\nb\n"),
        GrammarParams(GrammarKind.JSON_SCHEMA, "{}" * 3000),
        GrammarParams(GrammarKind.EBNF, "a\r\nb\n"),
        GrammarParams(GrammarKind.EBNF, 'start: "a"'),
        GrammarParams(GrammarKind.REGEX, str(file)),
        GrammarParams(GrammarKind.CHOICE, '["yes", "\\"no\\"\\n"]'),
    ]


def check_json(found: dict[str, Any]) -> None:
    """Check the fake engine's answer to "hello" with two samples and logprobs."""
    assert found["model"] == "fake"
    assert found["seed"] == DEFAULT_SEED
    assert (found["prompt_tokens"], found["cached_tokens"]) == (6, 3)
    assert [sample["index"] for sample in found["samples"]] == [0, 1]
    assert [sample["text"] for sample in found["samples"]] == [chr(BOS) + "hello", "hello" + chr(BOS)]
    first = found["samples"][0]
    assert {key: found[key] for key in first if key != "index"} == {k: v for k, v in first.items() if k != "index"}
    assert found["token_ids"] == [BOS, *b"hello"]
    assert (found["finish_reason"], found["matched_stop"]) == ("length", None)
    assert found["usage"] == {
        "prompt_tokens": 6, "cached_tokens": 3, "output_tokens": 6, "preemptions": 0,
        "accepted_prediction_tokens": 1, "rejected_prediction_tokens": 2, "pauses": 0,
        "resumed_tokens": 0, "omitted_prefix_lines": 0, "omitted_suffix_lines": 0, "omitted_file_lines": 0,
        "omitted_edits": 0,
    }  # fmt: skip
    assert found["metrics"] == {
        "speculative_decoding": {
            "mean_acceptance_length": 2.0, "draft_acceptance_rate": 0.5, "acceptance_histogram": [1, 1, 1],
            "num_spec_steps": 3, "num_draft_tokens": 6, "num_accepted_draft_tokens": 3, "num_steps": 5,
            "by_drafter": {
                "suffix": {"num_draft_tokens": 4, "num_accepted_draft_tokens": 3, "draft_acceptance_rate": 0.75},
                "idle": {"num_draft_tokens": 0, "num_accepted_draft_tokens": 0, "draft_acceptance_rate": 0.0},
            },
        }
    }  # fmt: skip
    assert "speculation" not in found
    assert found["timings"] == {
        "queue_ms": 0.5, "prefill_ms": 1.5, "decode_ms": 2.5, "draft_ms": 0.25, "verify_ms": 0.75,
    }  # fmt: skip
    assert found["logprobs"][1] == {"token_id": ord("h"), "logprob": -0.5, "top": [[ord("h"), -0.5], [1, -1.25]]}


async def test_json_is_the_same_locally_and_on_a_server(run_on: Callable[[SpyEngine], Invoke]) -> None:
    # The fake engine counts the places at which prediction and prompt, BOS first, agree.
    args = ["hello", "--json", "--n", "2", "--logprobs", "2", "--prediction", "xhx", "--session", "s"]
    async with running_server() as server:
        remote = ["generate", "--server", f"127.0.0.1:{server.addresses.grpc_port}", *args]
        over_grpc = await asyncio.to_thread(CliRunner().invoke, cli, remote)
    here = run_on(SpyEngine())(*args)
    assert (here.exit_code, over_grpc.exit_code) == (0, 0), over_grpc.output
    for result in (here, over_grpc):
        check_json(json.loads(result.stdout))
    a, b = json.loads(here.stdout), json.loads(over_grpc.stdout)
    assert a.pop("request_id") != b.pop("request_id")
    assert a == b


async def test_a_server_streams_text_chat_and_errors() -> None:
    async with running_server() as server:
        address = f"127.0.0.1:{server.addresses.grpc_port}"

        async def run(*args: str) -> Result:
            return await asyncio.to_thread(CliRunner().invoke, cli, ["generate", "--server", address, *args])

        chat = await run("--chat", "hi")
        several = await run("ab", "--n", "2")
        bad = await run("x", "--top-p", "2", "--temperature", "-1")
        long = await run("x" * 200)
        mistaken = await run("x", "--target", "m", "--kv-tokens", "512", "--trace-file", "f")
        # A drafter of the server's is not one of an engine here: `model` needs no --draft.
        unknown = await run("x", "--drafter", "model")
        slow = await run("x", "--target-tpot-ms", "-1", "--regex", "(")
    assert chat.stdout == "user:hi;\n"
    assert f"--- sample 1\nab{chr(BOS)}\n" in several.stdout
    assert (bad.exit_code, bad.stdout) == (1, "")
    (line,) = bad.stderr.splitlines()
    assert "INVALID_ARGUMENT" in line
    assert "sampling.top_p" in line
    assert "sampling.temperature" in line
    assert (long.exit_code, len(long.stderr.splitlines())) == (1, 1)
    assert "the limit is 127" in long.stderr
    assert mistaken.exit_code == 2
    assert "--target, --kv-tokens, --trace-file cannot be used with --server" in mistaken.stderr
    assert "speculation.drafters: unknown model; loaded: suffix" in unknown.stderr
    assert "target_tpot_ms" in slow.stderr


def test_an_error_after_a_part_of_the_answer_begins_a_line(run_on: Callable[[SpyEngine], Invoke]) -> None:
    def broken() -> Invoke:
        return run_on(SpyEngine(on_third_step=EngineDeadError()))

    result = broken()("hello")
    assert (result.exit_code, result.output.splitlines()[1][:23]) == (1, "Error: the engine proce")
    assert broken()("hello", "--json").stdout == ""


class SilentEngine(SpyEngine):
    """Its answers have no text."""

    def step(self) -> list[RequestEvent]:
        return [replace(event, text="") if isinstance(event, Delta) else event for event in super().step()]


def test_a_whole_answer_ends_with_a_line_break_even_without_text(run_on: Callable[[SpyEngine], Invoke]) -> None:
    result = run_on(SilentEngine())("hello")
    assert (result.exit_code, result.stdout) == (0, "\n")


def test_errors_are_one_line_and_exit_code_1(run_on: Callable[[SpyEngine], Invoke]) -> None:
    nobody = CliRunner().invoke(cli, ["generate", "--server", "127.0.0.1:1", "x"])
    broken = run_on(SpyEngine())("x", "--kv-tokens", "5")
    late = run_on(SpyEngine())("x" * 50, "--timeout", "1e-9")
    for result, text in ((nobody, "no specdec server answers"), (broken, "engine.kv_tokens"), (late, "deadline")):
        assert result.exit_code == 1
        assert len(result.stderr.splitlines()) == 1
        assert text in result.stderr


def test_misuse_is_reported(run_on: Callable[[SpyEngine], Invoke]) -> None:
    invoke = run_on(SpyEngine())
    for args in (
        ["x", "--logprobs", "2"], ["x", "--threads", "-1"], ["x", "--seed", "-1"], ["x", "--n", "0"], ["\udcff"],
        ["x", "--prediction", "\udcff"], ["x", "--session", "\udcff"], ["x", "--choice", "\udcff"],
        ["x", "--stop", "\udcff"], ["x", "--model", "\udcff"], ["x", "--drafter", "\udcff"], ["x", "--draft", "\udcff"],
        ["x", "--regex", "\udcff"], ["x", "--prediction-file", "/no/such/file"], ["x", "--json-schema", sys.executable],
        ["x", "--json-object", "--regex", "a"], ["x", "--choice", "a", "--ebnf", "b"],
        ["x", "--prediction", "a", "--prediction-file", __file__],
    ):  # fmt: skip
        result = invoke(*args)
        assert (result.exit_code, "Error" in result.stderr) == (2, True), args


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("--n", "0", "1<=x<=16"), ("--n", "4000000000", "1<=x<=16"),
        ("--top-k", "-1", "0<=x<=4294967295"), ("--threads", "-1", "x>=0"),
        *[("--timeout", value, "0<x<=1000000000") for value in ("0", "-1", "1e10", "inf", "nan")],
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_refused_with_the_range(flag: str, value: str, allowed: str) -> None:
    result = CliRunner().invoke(cli, ["generate", "--server", "127.0.0.1:1", "x", flag, value])
    assert result.exit_code == 2
    assert re.search(rf"'{flag}': \S+ is not in the range {re.escape(allowed)}\.$", result.stderr.strip())


@pytest.mark.parametrize(
    ("resumed", "figures"), [(0, "399.0 tokens/s, 8.00 per step"), (300, "99.0 tokens/s, 2.00 per step")]
)
def test_the_figures_of_a_resumed_answer_cover_its_last_part(resumed: int, figures: str) -> None:
    usage = Usage(9, 0, 400, resumed_tokens=resumed)
    answer = generate.Answer("m", 1, lambda text: None)
    answer.take(
        Finished("r", 0, FinishReason.EOS, None, usage, SpeculationStats(num_steps=50), Timings(decode_ms=1000.0))
    )
    assert answer.summary() == f"[400 tokens, {figures}, eos]"


def test_ctrl_c_aborts_and_exits_quietly(run_on: Callable[[SpyEngine], Invoke]) -> None:
    engine = SpyEngine(KeyboardInterrupt())
    result = run_on(engine)("hello")
    assert result.exit_code == 130
    assert result.stderr.strip() == "stopped"
    assert engine.aborted == [True]
