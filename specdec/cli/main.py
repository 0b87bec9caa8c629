"""Entry point of the `specdec` command."""

from __future__ import annotations

import click

import specdec
from specdec.cli.lazy_group import LazyCommand, LazyGroup

_COMMANDS = {
    "serve": LazyCommand("specdec.cli.serve_cmd:serve_command", "Serve a model over gRPC."),
    "generate": LazyCommand("specdec.cli.generate_cmd:generate_command", "Generate text, here or on a server."),
    "lsp": LazyCommand("specdec.cli.lsp_cmd:lsp_command", "Suggest code in editors, as a language server."),
    "trace": LazyCommand("specdec.cli.trace_cmd:trace_group", "Show why a server drafted as it did."),
    "keys": LazyCommand("specdec.cli.keys_cmd:keys_group", "Make keys for a server."),
    "models": LazyCommand("specdec.cli.models_cmd:models_group", "List and fetch the models known by name."),
    "verify": LazyCommand("specdec.cli.verify_cmd:verify_command", "Check path identity on a real model."),
    "bench": LazyCommand("specdec.cli.bench_cmd:bench_group", "Measure this machine with a real model."),
    "ab": LazyCommand("specdec.cli.ab_cmd:ab_group", "Run, analyse and plan latency experiments."),
    "capture": LazyCommand("specdec.cli.capture_cmd:capture_command", "Make a trace of what a server was asked."),
    "replay": LazyCommand("specdec.cli.replay_cmd:replay_command", "Ask a trace again, and measure."),
    "doctor": LazyCommand("specdec.cli.doctor_cmd:doctor_command", "Check device, kernels, numbers and versions."),
}


@click.group(cls=LazyGroup, lazy=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(specdec.__version__, prog_name="specdec")
def cli() -> None:
    """A speculative-decoding-first LLM serving engine."""


def main() -> None:
    """Run the command line; does not return."""
    cli(prog_name="specdec")


if __name__ == "__main__":
    main()
