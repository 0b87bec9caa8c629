"""Every target that `make help` offers runs commands that exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from specdec.cli.main import cli
from tools.markdown import REPOSITORY

TARGETS = re.findall(r"^([a-z-]+):.*## ", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
PROGRAMS = {"ruff", "mypy", "lint-imports", "buf"}


def commands(target: str) -> list[list[str]]:
    """The commands of a target, split into words, without those that only set the environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    made = subprocess.run(
        ["make", "-n", "--no-print-directory", target, "ARGS="], cwd=REPOSITORY, env=environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = made.stdout.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith(".venv/bin/")]


def test_help_lists_every_target() -> None:
    printed = subprocess.run(["make", "help"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  make ([a-z-]+) ", printed, re.MULTILINE) == TARGETS
    assert len(TARGETS) > 20


@pytest.mark.parametrize("target", TARGETS)
def test_commands_of_a_target_exist(target: str) -> None:
    for program, *words in commands(target):
        name = Path(program).name
        if name == "specdec":
            check_command(words)
        elif name == "python" and words[0] == "-m":
            assert find_spec(words[1]), f"no module {words[1]}"
            for path in (word for word in words[2:] if word.startswith("tests/")):
                assert (REPOSITORY / path).exists(), path
        else:
            assert name in PROGRAMS, program


def check_command(words: list[str]) -> None:
    """A `specdec` command line names commands and options that there are."""
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group) and words:
        found = command.get_command(context, words[0])
        assert found is not None, words[0]
        command, words = found, words[1:]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options
