"""`specdec chat`: a conversation at the terminal, here or with a server."""

from __future__ import annotations

import sys
import uuid
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from specdec.cli.generate import Answer, model_options, pop_call, write_text
from specdec.cli.options import TEXT, ScreenCommand, check_text
from specdec.client.prompt import ChatTurn
from specdec.core.types import Request, SpeculationMode
from specdec.errors import SpecdecError

if TYPE_CHECKING:
    from specdec.cli.runners import Runner

_SCREEN = {
    "Where it runs": ("--server", "--key-file", "--model", "--config", "--target", "--draft"),
    "Answers": ("--system", "--max-tokens", "--temperature", "--seed", "--speculation"),
}
_HELP = "/off, /auto, /on: speculation; /clear: forget the conversation; Ctrl-C: stop an answer; Ctrl-D: leave"


@click.command("chat", cls=ScreenCommand, screen=_SCREEN)
@click.option("--system", type=TEXT, help="System message: instructions that hold for the conversation.")
@model_options
def chat_command(server: str | None, model: str, system: str | None, **values: Any) -> None:
    """Hold a conversation, and show after each answer what speculation did.

    Commands: /off, /auto, /on (speculation), /clear (forget the conversation). Ctrl-C stops an answer, Ctrl-D leaves.
    """
    open_runner, request = pop_call(server, model, values)
    if request.sampling.n > 1:
        raise click.UsageError("--n: a conversation goes on from one answer; leave it out")
    with open_runner() as runner:
        click.echo(f"{runner.model}. {_HELP}", err=True)
        Conversation(runner, request, system).run()


class Conversation:
    """The messages so far, and the speculation mode of the next answer."""

    def __init__(self, runner: Runner, request: Request, system: str | None = None) -> None:
        """request: the options of every answer; its texts may be drafted from in later ones."""
        self._runner, self._model = runner, runner.model
        self._request = replace(request, session=request.session or uuid.uuid4().hex)
        self._system = [ChatTurn("system", system)] if system else []
        self._turns = [*self._system]

    def run(self) -> None:
        """Answer lines of standard input until its end."""
        if sys.stdin.isatty():
            import readline  # noqa: F401  # gives `input` line editing and a history
        while (line := _read_line()) is not None:
            if line.startswith("/"):
                self._obey(line.strip())
            elif line.strip():
                self._answer(line)

    def _obey(self, command: str) -> None:
        if command[1:] in tuple(SpeculationMode):
            speculation = replace(self._request.speculation, mode=SpeculationMode(command[1:]))
            self._request = replace(self._request, speculation=speculation)
            _note(f"speculation: {command[1:]}")
        elif command == "/clear":
            self._turns = [*self._system]
            _note("the conversation is forgotten")
        else:
            _note(_HELP)

    def _answer(self, text: str) -> None:
        turns = [*self._turns, ChatTurn("user", text)]
        answer = Answer(self._model, 1, write_text)
        request = replace(self._request, request_id=uuid.uuid4().hex)
        stopped = False
        try:
            check_text(text, "the line")
            with closing(self._runner.events(turns, request)) as events:
                for event in events:
                    answer.take(event)
        except KeyboardInterrupt:
            stopped = True
        except (SpecdecError, click.UsageError) as error:
            if answer.text:
                click.echo()
            _note(f"Error: {' '.join(str(error).split())}")
            return
        click.echo()
        _note("[stopped]" if stopped else f"{answer.summary()} {answer.cut_message(request)}".strip())
        self._turns = [*turns, ChatTurn("assistant", answer.text)]


def _note(text: str) -> None:
    click.echo(click.style(text, dim=True), err=True)


def _read_line() -> str | None:
    """The next line; empty after Ctrl-C, None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except KeyboardInterrupt:
        click.echo()
        return ""
