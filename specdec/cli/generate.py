"""`specdec generate`: one prompt, here or on a server."""

from __future__ import annotations

import functools
import json
import os
import sys
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec.cli.options import (
    POSITIVE,
    TEXT,
    ScreenCommand,
    WholeNumber,
    add_engine_options,
    add_options,
    check_text,
    credential_options,
    drafter_names,
    engine_named,
    model_option,
    pop_config,
    pop_credentials,
    read_server,
    refuse_credentials,
)
from specdec.client.prompt import ChatTurn
from specdec.core.fields import MAX_N
from specdec.core.types import (
    Delta,
    Finished,
    FinishReason,
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    RequestEvent,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    Started,
    StoppingParams,
    TokenLogprobs,
    metrics_dict,
)

if TYPE_CHECKING:
    from specdec.cli.runners import Runner
    from specdec.config import EngineConfig


PREDICTION_OPTIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--prediction", {"type": TEXT}, "What the output is expected to look like: drafted from, never forced."),
    ("--prediction-file", {"type": click.Path(exists=True, dir_okay=False, path_type=Path)}, "The same, from a file."),
)
GRAMMAR_OPTIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--json-schema", {"metavar": "FILE_OR_TEXT"}, "The output must be JSON of this schema."),
    ("--json-object", {"is_flag": True}, "The output must be a JSON object."),
    ("--regex", {}, "The output must match this regular expression (Rust syntax) as a whole."),
    ("--ebnf", {"metavar": "FILE_OR_TEXT"}, "The output must follow this grammar: Lark rules with a start, or GBNF."),
    ("--choice", {"type": TEXT, "multiple": True}, "The output must be one of these texts; a --choice for each."),
)


def pop_prediction(values: dict[str, Any]) -> str:
    """Take the prediction's options out of ``values``; empty: none was given.

    Raises:
        click.UsageError: two were given, or one is not text.
    """
    text, file = values.pop("prediction"), values.pop("prediction_file")
    if text is not None and file is not None:
        raise click.UsageError("--prediction and --prediction-file cannot be used together")
    if file is not None:
        return _read(file, "--prediction-file")
    return text or ""


def pop_grammar(values: dict[str, Any]) -> GrammarParams | None:
    """Take the grammar's options out of ``values``.

    Raises:
        click.UsageError: two were given, or one is not text.
    """
    found = {kind: values.pop(kind.value) for kind in GrammarKind}
    given = [kind for kind, value in found.items() if value not in (None, (), False)]
    if not given:
        return None
    if len(given) > 1:
        flags = ", ".join(_flag(kind) for kind in given)
        raise click.UsageError(f"{flags} cannot be used together")
    (kind,) = given
    value = found[kind]
    if kind == GrammarKind.JSON_OBJECT:
        return GrammarParams(kind)
    if kind == GrammarKind.CHOICE:
        return GrammarParams(kind, json.dumps(value, ensure_ascii=False))
    if kind in _MARKS and os.path.isfile(value):
        return GrammarParams(kind, _read(Path(value), _flag(kind)))
    if kind in _MARKS and _MARKS[kind] not in value:
        raise click.UsageError(f"{_flag(kind)}: no such file: {value}")
    return GrammarParams(kind, check_text(value, _flag(kind)))


# Grammars that may be given as a file, and what every such grammar contains.
_MARKS = {GrammarKind.JSON_SCHEMA: "{", GrammarKind.EBNF: ":"}


def _flag(kind: GrammarKind) -> str:
    return f"--{kind.value.replace('_', '-')}"


def _read(path: Path, flag: str) -> str:
    try:
        return path.read_bytes().decode()  # line ends as they are: they are tokens too
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"cannot be read: {error.strerror}"
        raise click.UsageError(f"{flag}: {path} {reason}") from None


_U32 = WholeNumber(0, 2**32 - 1)
_OPTIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--max-tokens", {"type": _U32, "default": 256, "show_default": True}, "Longest output."),
    ("--min-tokens", {"type": _U32, "default": 0}, "Shortest output."),
    ("--temperature", {"type": float, "default": 0.0, "show_default": True}, "0 is greedy."),
    ("--top-k", {"type": _U32, "default": 0}, "Keep the k likeliest tokens; 0: off."),
    ("--top-p", {"type": float, "default": 1.0}, "Keep the likeliest tokens of this total probability."),
    ("--min-p", {"type": float, "default": 0.0}, "Drop tokens below this share of the likeliest one's probability."),
    ("--repetition-penalty", {"type": float, "default": 1.0}, "Above 1: seen tokens become less likely."),
    ("--presence-penalty", {"type": float, "default": 0.0}, "Subtracted once per token of the output."),
    ("--frequency-penalty", {"type": float, "default": 0.0}, "Subtracted per occurrence in the output."),
    ("--seed", {"type": WholeNumber(0, 2**64 - 1)}, "Same seed, same tokens. Drawn when not given."),
    ("--n", {"type": WholeNumber(1, MAX_N), "default": 1}, "Samples of the prompt."),
    ("--stop", {"type": TEXT, "multiple": True}, "Stop at this text; may be repeated."),
    ("--ignore-eos", {"is_flag": True}, "Do not stop at the model's end token."),
    ("--logprobs", {"type": _U32}, "Log-probabilities of the chosen and the k likeliest tokens; needs --json."),
    ("--speculation", {"type": click.Choice([m.value for m in SpeculationMode]), "default": "auto"},
     "Drafting: as the controller decides, never, or always up to the caps."),
    ("--max-nodes", {"type": _U32}, "Draft nodes of one tree."),
    ("--max-depth", {"type": _U32}, "Depth of one tree."),
    ("--width", {"type": _U32}, "Children per node."),
    ("--session", {"type": TEXT, "default": ""},
     "Name of an editor or conversation whose earlier texts may be drafted from."),
    ("--target-tpot-ms", {"type": float}, "Milliseconds per token to keep to: drafts go to those that lag behind."),
    ("--timeout", {"type": POSITIVE}, "Seconds after which the request is given up."),
)  # fmt: skip


def _request(request_id: str, values: dict[str, Any], drafters: tuple[str, ...], indexes: tuple[str, ...]) -> Request:
    names = [flag.lstrip("-").replace("-", "_") for flag, _, _ in _OPTIONS]
    v = {name: values.pop(name) for name in names}
    wanted = drafter_names(drafters)
    return Request(
        request_id=request_id,
        prompt_ids=(),
        sampling=SamplingParams(**{f.name: v[f.name] for f in fields(SamplingParams) if f.name in v}),
        stopping=StoppingParams(v["max_tokens"], v["min_tokens"], tuple(v["stop"]), ignore_eos=v["ignore_eos"]),
        output=OutputParams(logprobs=v["logprobs"]),
        speculation=SpeculationParams(
            mode=SpeculationMode.OFF if wanted == ("none",) else SpeculationMode(v["speculation"]),
            drafters=tuple(name for name in wanted if name != "none") or None,
            max_nodes=v["max_nodes"],
            max_depth=v["max_depth"],
            width=v["width"],
            indexes=indexes or None,
        ),
        deadline_s=v["timeout"],
        session=v["session"],
        target_tpot_ms=v["target_tpot_ms"],
        grammar=pop_grammar(values),
    )


_CUT = 3  # exit code
_SCREEN = {
    "Where it runs": ("--server", "--key-file", "--config", "--target", "--draft"),
    "Prompt and output": ("--chat", "--prediction", "--json-schema", "--regex", "--json"),
    "Sampling": ("--max-tokens", "--temperature", "--seed", "--stop"),
    "Speculation": ("--speculation", "--drafter"),
}


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the model and of a request to ``command``, which gives its keyword arguments to `pop_call`."""
    server = click.option(
        "--server",
        callback=read_server,
        help="HOST:PORT of a running server, or several alike with commas between: where one fails, the next goes on. "
        "Without it the model runs in this process.",
    )
    command = add_options(add_engine_options(command), (*_OPTIONS, *GRAMMAR_OPTIONS))
    return server(credential_options(model_option(command)))


def pop_call(
    server: str | None, model: str, values: dict[str, Any]
) -> tuple[Callable[[], AbstractContextManager[Runner]], Request]:
    """Take the options of `model_options` out of ``values``.

    Returns:
        What opens a runner, and the request without its prompt.

    Raises:
        click.UsageError: options contradict each other, or a text is not UTF-8.
    """
    drafters, indexes = values["drafter"], tuple(text.partition("=")[0] for text in values["index"])
    open_runner: Callable[[], AbstractContextManager[Runner]]
    if server is None:
        refuse_credentials(values)
        open_runner = functools.partial(_local_runner, engine_named(pop_config(values), model))
    else:
        # Drafters and indexes are chosen among those that it has loaded: they say nothing about an engine here.
        _refuse_engine_options(values)
        from specdec.cli.runners import RemoteRunner

        open_runner = functools.partial(RemoteRunner, server, pop_credentials(values), model)
    return open_runner, _request(uuid.uuid4().hex, values, drafters, indexes)


@click.command("generate", cls=ScreenCommand, screen=_SCREEN)
@click.argument("prompt", required=False)
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: tokens, text, statistics, timings.")
@functools.partial(add_options, options=PREDICTION_OPTIONS)
@model_options
def generate_command(
    prompt: str | None, server: str | None, model: str, chat: bool, as_json: bool, **values: Any
) -> None:
    """Generate text for PROMPT (or standard input), and stream it to standard output. Exit code 3: structured output
    was cut at --max-tokens."""
    if values["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs needs --json")
    open_runner, request = pop_call(server, model, values)
    prediction = pop_prediction(values)
    text = check_text(_read_prompt(prompt), "the prompt")
    with open_runner() as runner:
        whole = _show(runner, [ChatTurn("user", text)] if chat else text, request, prediction, as_json)
    if not whole and request.grammar is not None:
        sys.exit(_CUT)


@contextmanager
def _local_runner(config: EngineConfig) -> Iterator[Runner]:
    from specdec.cli.progress_bar import load_parts
    from specdec.cli.runners import LocalRunner
    from specdec.engine.engine import Engine

    parts = load_parts(config)
    with closing(Engine(parts)) as engine:
        yield LocalRunner(engine, parts.tokenizer)


def _show(runner: Runner, prompt: str | list[ChatTurn], request: Request, prediction: str, as_json: bool) -> bool:
    """Run ``request`` and print the answer. Returns whether no sample was cut at the token limit."""
    write = (lambda _: None) if as_json else write_text  # JSON is printed whole
    answer = Answer(runner.model, request.sampling.n, write)
    # A generator left by an exception is closed here and now, not whenever it is collected: closing it aborts.
    with closing(runner.events(prompt, request, prediction)) as events:
        try:
            for event in events:
                answer.take(event)
        except BaseException:
            if answer.text and not as_json:
                click.echo()  # an error begins a line of its own
            raise
    click.echo(json.dumps(answer.as_dict(logprobs=request.output.logprobs is not None)) if as_json else "")
    if sys.stderr.isatty() and not as_json:
        click.echo(click.style(answer.summary(), dim=True), err=True)
    message = answer.cut_message(request)
    if message:
        click.echo(message, err=True)
    return not message


def _read_prompt(prompt: str | None) -> str:
    if prompt is None or prompt == "-":
        if sys.stdin.isatty():
            raise click.UsageError("give a PROMPT, or pipe one in")
        prompt = sys.stdin.read().removesuffix("\n")
    return prompt


def _refuse_engine_options(values: dict[str, Any]) -> None:
    """Refuse options that have no effect on a server's model."""
    names = [name for name in values if name.startswith("engine__") or name == "config_file"]
    flags = {param.name: param.opts[0] for param in click.get_current_context().command.params}
    given = [flags[name] for name in names if values[name] is not None]
    if given:
        raise click.UsageError(f"{', '.join(given)} cannot be used with --server")
    if any("=" in text for text in values["index"]):
        raise click.UsageError("--index: with --server it takes the NAME of one of the server's indexes, and no file")


@dataclass(slots=True)
class _Sample:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: Finished | None = None


class Answer:
    """Collects a request's events. ``write`` gets text as it arrives: of one sample at once, of several each when it
    has ended, under a heading."""

    def __init__(self, model: str, samples: int, write: Callable[[str], None]) -> None:
        self._model = model
        self._write = write
        self._n = samples
        self._samples: defaultdict[int, _Sample] = defaultdict(_Sample)
        self._started: Started | None = None

    def take(self, event: RequestEvent) -> None:
        """The next event."""
        if isinstance(event, Started):
            self._started = event
        elif isinstance(event, Delta):
            sample = self._samples[event.index]
            sample.token_ids += event.token_ids
            sample.text += event.text
            sample.logprobs += event.logprobs
            if self._n == 1:
                self._write(event.text)
        elif isinstance(event, Finished):
            self._samples[event.index].end = event
            if self._n > 1:
                self._write(f"--- sample {event.index}\n{self._samples[event.index].text}\n")

    @property
    def text(self) -> str:
        """The first sample's text so far."""
        return self._samples[0].text

    def cut_message(self, request: Request) -> str:
        """A sentence about a sample that ended at a limit of ``request`` or of the model; empty if there is none."""
        ended = ((len(one.token_ids), one.end) for one in self._samples.values())
        tokens = next((count for count, end in ended if end and end.reason == FinishReason.LENGTH), None)
        if tokens is None:
            return ""
        at_limit = tokens >= (request.stopping.max_tokens or 0)
        why = "--max-tokens sets the limit" if at_limit else "the model's context is full"
        return f"the output was cut at {tokens} tokens; {why}"

    def as_dict(self, *, logprobs: bool) -> dict[str, Any]:
        """Facts of the request and of its first sample, and ``samples``: the same of every one."""
        samples = [_sample_dict(i, self._samples[i], logprobs) for i in range(self._n)]
        started = self._started
        head: dict[str, Any] = {"model": self._model}
        if started is not None:
            head |= {name: getattr(started, name) for name in ("request_id", "seed", "prompt_tokens", "cached_tokens")}
        first = {key: value for key, value in samples[0].items() if key != "index"}
        return {**head, **first, "samples": samples}

    def summary(self) -> str:
        """One line of figures about the first sample; empty when it has not ended."""
        end = self._samples[0].end
        if end is None:
            return ""
        tokens, steps, ms = end.usage.output_tokens, max(end.stats.num_steps, 1), end.timings.decode_ms
        said = tokens - end.usage.resumed_tokens  # where it was resumed, steps and times are of its last part alone
        rate = f", {(said - 1) / ms * 1e3:.1f} tokens/s" if ms > 0 and said > 1 else ""
        drafted = end.stats.num_draft_tokens
        drafts = f", {end.stats.num_accepted_draft_tokens} of {drafted} drafted accepted" if drafted else ""
        return f"[{tokens} tokens{rate}, {said / steps:.2f} per step{drafts}, {end.reason}]"


def write_text(text: str) -> None:
    """Show text at once; characters that the terminal cannot show become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _sample_dict(index: int, sample: _Sample, logprobs: bool) -> dict[str, Any]:
    end = sample.end
    found: dict[str, Any] = {"index": index, "token_ids": sample.token_ids, "text": sample.text}
    if end is not None:
        found |= {
            "finish_reason": end.reason.value,
            "matched_stop": end.matched_stop,
            "usage": asdict(end.usage),
            "metrics": metrics_dict(end.stats),
            "timings": asdict(end.timings),
        }
    if logprobs:
        found["logprobs"] = [asdict(row) for row in sample.logprobs]
    return found
