"""Commands that the documents show exist, with the options that they are shown with."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from specdec.cli.main import cli
from tools.markdown import REPOSITORY

PAGES = [
    *sorted(REPOSITORY.glob("*.md")),
    *(p for p in sorted((REPOSITORY / "docs").glob("*.md")) if p.name != "log.md"),
]


def commands(page: Path) -> list[str]:
    """Lines of code blocks, indented or fenced; those that end with a backslash are joined with the next."""
    text = re.sub(r" *\\\n\s*", " ", page.read_text(encoding="utf-8"))
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    fenced = "\n".join(block for language, block in blocks if language in ("", "sh", "bash"))
    indented = "\n".join(re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE))
    return [line.strip() for line in f"{fenced}\n{indented}".splitlines()]


def words(command: str) -> list[str]:
    """The words before a comment sign, a pipe, or a redirection."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[str] = []
    for word in lexer:
        if set(word) <= set("|&;<>()"):
            break
        found.append(word)
    return found


def resolve(arguments: list[str]) -> tuple[click.Command, list[str]]:
    """The command with which ``asked``, the words after `specdec`, starts, and the rest of it."""
    command: click.Command = cli
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        found = command.get_command(click.Context(command), arguments[0])
        if found is None:
            break
        command, arguments = found, arguments[1:]
    return command, arguments


def options(command: click.Command) -> set[str]:
    """Every spelling of every option."""
    context = click.Context(command, help_option_names=["-h", "--help"])
    return {name for p in command.get_params(context) for name in (*p.opts, *p.secondary_opts) if name[0] == "-"}


SHOWN = [
    pytest.param(words(line), id=f"{page.name}: {line[:60]}")
    for page in PAGES
    for line in commands(page)
    if re.match(r"(\S*/)?specdec ", line)
]


def test_the_documents_contain_commands() -> None:
    assert len(SHOWN) > 15
    assert {page.name for page in PAGES if any("specdec " in line for line in commands(page))} >= {
        "README.md", "quickstart.md", "adding-a-model-family.md", "configuration.md",
    }  # fmt: skip


@pytest.mark.parametrize("arguments", SHOWN)
def test_commands_and_their_options_exist(arguments: list[str]) -> None:
    command, rest = resolve(arguments[1:])
    if isinstance(command, click.Group) and not command.invoke_without_command:
        assert rest in (["--help"], ["--version"]), f"{command.name} has no such command"
    given = {word.split("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
    assert given <= options(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {words(line)[1] for line in commands(page) if line.startswith("make ")}
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    folders = "examples|tests|draft|specdec|server|bench|verify_kernels|tools"
    pattern = rf"\b((?:{folders})/[\w/.-]*\w\.(?:py|sh|proto|lua|cpp|h))\b"
    named = set(re.findall(pattern, text))
    assert not [path for path in sorted(named) if "NAME" not in path and not (REPOSITORY / path).exists()]


def test_an_invalid_command_would_be_detected() -> None:
    command, rest = resolve(words(".venv/bin/specdec bench engine --nothing 3  # says")[1:])
    assert (command.name, rest) == ("engine", ["--nothing", "3"])
    assert "--nothing" not in options(command)
    assert resolve(["models", "lisst"])[1] == ["lisst"]
