"""Entry point of the `specdec` command: a group that imports a subcommand only when it is invoked."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

import click

import specdec
from specdec.errors import SpecdecError


class LazyGroup(click.Group):
    """`specdec --help` is instant, because nothing heavy is imported for it. A `SpecdecError`, or an error of the
    system such as a full disk, ends any subcommand with its text on standard error and exit code 1. Ctrl-C ends it
    with one line and exit code 130, as in shells, unless the subcommand handles it; the line includes the text of the
    `KeyboardInterrupt`, if it has one."""

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        """lazy: by subcommand, where it is (module:attribute), and its line in the help."""
        super().__init__(*args, **kwargs)
        self._lazy = lazy
        self.commands = {name: click.Command(name) for name in lazy}  # never run: click names the likely one of them

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        found: click.Command = resolve_name(self._lazy[cmd_name][0])
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._lazy.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SpecdecError as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt as stop:
            click.echo("\n" + "; ".join(("stopped", *stop.args)), err=True)
            ctx.exit(130)
        except OSError as error:
            # click ends in silence where the reader of a pipe left; an error without a number may have no text.
            if error.errno in (None, errno.EPIPE):
                raise
            raise click.ClickException(str(error)) from error


_COMMANDS = {
    "serve": ("specdec.cli.serve:serve_command", "Serve a model over gRPC and HTTP."),
    "generate": ("specdec.cli.generate:generate_command", "Generate text, here or on a server."),
    "chat": ("specdec.cli.chat:chat_command", "Hold a conversation, here or with a server."),
    "status": ("specdec.cli.serve:status_command", "Show what a server runs and how busy it is."),
    "lsp": ("specdec.cli.lsp:lsp_command", "Suggest code in editors, as a language server."),
    "trace": ("specdec.cli.trace:trace_group", "Show why a server drafted as it did."),
    "keys": ("specdec.cli.serve:keys_group", "Make keys for a server."),
    "models": ("specdec.cli.models:models_group", "List and fetch the models known by name."),
    "index": ("specdec.cli.index:index_command", "Index files of yours to draft from."),
    "train-head": ("specdec.cli.train:train_head_command", "Train a drafter for a model."),
    "verify": ("specdec.cli.checks:verify_command", "Check path identity on a real model."),
    "bench": ("specdec.cli.bench:bench_group", "Measure engines, servers and drafters."),
    "ab": ("specdec.cli.ab:ab_group", "Run, analyse and plan latency experiments."),
    "replay": ("specdec.cli.bench_serve:replay_command", "Send captured requests to a server, and measure."),
    "cluster": ("specdec.cli.cluster:cluster_group", "Serve models by several replicas."),
    "plan": ("specdec.cli.plan:plan_group", "Compute how many replicas a load needs."),
    "doctor": ("specdec.cli.checks:doctor_command", "Check device, kernels, numbers and versions."),
}


@click.group(cls=LazyGroup, lazy=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(specdec.__version__, prog_name="specdec")
def cli() -> None:
    """A speculative-decoding-first LLM serving engine."""
    # Python reads arguments like this too; `check_text` finds what was not UTF-8 in both.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def _open_closed_streams() -> None:
    """Connect to /dev/null what the caller has closed of standard input, output and error: the next file or socket
    would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115  # stays open, for child processes too
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def main() -> None:
    """Run the command line; does not return."""
    _open_closed_streams()
    specdec.put_own_modules_first()
    # Processes are started by exec, which gRPC's handlers of fork have no part in but a warning on the terminal.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its log repeats errors that we report, in a form of its own
    cli(prog_name="specdec")


if __name__ == "__main__":
    main()
