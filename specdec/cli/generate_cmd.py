"""`specdec generate`: one prompt, here or on a server."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import click

from specdec.cli.ask import Ask, ask_options, pop_ask
from specdec.cli.options import add_engine_options, flag_of, pop_config

if TYPE_CHECKING:
    from specdec.cli.local_runner import LocalRunner
    from specdec.cli.remote_runner import RemoteRunner
    from specdec.config import EngineConfig

_INTERRUPTED = 130


@click.command("generate")
@click.argument("prompt", required=False)
@click.option("--server", help="HOST:PORT of a running server; without it the model runs in this process.")
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: tokens, text, statistics, timings.")
@ask_options
@add_engine_options
def generate_command(prompt: str | None, server: str | None, chat: bool, as_json: bool, **values: Any) -> None:
    """Generate text for PROMPT (or standard input), and stream it to standard output."""
    if values["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs needs --json")
    if server is not None:
        _refuse_engine_options(values)
    drafters = values["drafter"]
    # On a server, drafters are chosen among those it has loaded: they say nothing about an engine here.
    config = pop_config(values).engine if server is None else None
    ask = pop_ask(_read_prompt(prompt), chat, uuid.uuid4().hex, values, drafters)
    try:
        with _runner(server, config) as runner:
            _show(runner, ask, as_json)
    except KeyboardInterrupt:
        click.echo("\ncancelled", err=True)
        sys.exit(_INTERRUPTED)


@contextmanager
def _runner(server: str | None, config: EngineConfig | None) -> Iterator[LocalRunner | RemoteRunner]:
    if server is not None:
        from specdec.cli.remote_runner import RemoteRunner

        with RemoteRunner(server) as remote:
            yield remote
        return
    from specdec.cli.local_runner import LocalRunner
    from specdec.engine.build import build_parts
    from specdec.engine.engine import Engine
    from specdec.models.progress_bar import ProgressBar

    assert config is not None  # without a server there is one
    with ProgressBar() as progress:
        parts = build_parts(config, progress)
    with closing(Engine(parts)) as engine:
        yield LocalRunner(engine, parts.tokenizer)


def _show(runner: LocalRunner | RemoteRunner, ask: Ask, as_json: bool) -> None:
    from specdec.cli.answer import Answer, write_text

    def keep_quiet(_: str) -> None:
        """JSON is printed whole."""

    answer = Answer(runner.model, ask.request.sampling.n, keep_quiet if as_json else write_text)
    # A generator left by an exception is closed here and now, not whenever it is collected: closing it aborts.
    with closing(runner.events(ask)) as events:
        for event in events:
            answer.take(event)
    if as_json:
        click.echo(json.dumps(answer.as_dict(logprobs=ask.request.output.logprobs is not None)))
        return
    click.echo()
    if sys.stderr.isatty():
        click.echo(click.style(answer.summary(), dim=True), err=True)


def _read_prompt(prompt: str | None) -> str:
    if prompt is None or prompt == "-":
        if sys.stdin.isatty():
            raise click.UsageError("give a PROMPT, or pipe one in")
        prompt = sys.stdin.read().removesuffix("\n")
    return prompt


def _refuse_engine_options(values: dict[str, Any]) -> None:
    """The server's model is the server's; an option that would do nothing is a mistake to be told."""
    names = [name for name in values if name.startswith("engine__") or name == "config_file"]
    given = [flag_of(name) for name in names if values[name] is not None]
    if given:
        raise click.UsageError(f"{', '.join(given)} can not be used with --server")
