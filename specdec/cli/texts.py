"""Options of `specdec generate` that carry texts: the expected output, and what the output must match."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from specdec.types import GrammarKind, GrammarParams

PREDICTION_OPTIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--prediction", {}, "What the output is expected to look like: drafted from, never forced."),
    ("--prediction-file", {"type": click.Path(exists=True, dir_okay=False, path_type=Path)}, "The same, from a file."),
)
GRAMMAR_OPTIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--json-schema", {"metavar": "FILE_OR_TEXT"}, "The output must be JSON of this schema."),
    ("--json-object", {"is_flag": True}, "The output must be a JSON object."),
    ("--regex", {}, "The output must match this regular expression (Rust syntax) as a whole."),
    ("--ebnf", {"metavar": "FILE_OR_TEXT"}, "The output must follow this grammar: Lark rules with a start, or GBNF."),
    ("--choice", {"multiple": True}, "The output must be one of these texts; give one --choice for each."),
)


def pop_prediction(values: dict[str, Any]) -> str:
    """Take the prediction's options out of ``values``; empty: none was given.

    Raises:
        click.UsageError: two were given, or one is not text.
    """
    text, file = values.pop("prediction"), values.pop("prediction_file")
    if text is not None and file is not None:
        raise click.UsageError("--prediction and --prediction-file can not be used together")
    if file is not None:
        return _read(file, "--prediction-file")
    return check_text(text or "", "--prediction")


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
        raise click.UsageError(f"{flags} can not be used together")
    (kind,) = given
    value = found[kind]
    if kind == GrammarKind.JSON_OBJECT:
        return GrammarParams(kind)
    if kind == GrammarKind.CHOICE:
        texts = [check_text(text, _flag(kind)) for text in value]
        return GrammarParams(kind, json.dumps(texts, ensure_ascii=False))
    if kind in (GrammarKind.JSON_SCHEMA, GrammarKind.EBNF) and os.path.isfile(value):
        return GrammarParams(kind, _read(Path(value), _flag(kind)))
    return GrammarParams(kind, check_text(value, _flag(kind)))


def check_text(text: str, name: str) -> str:
    """``text`` as it is, which came from the command line.

    Raises:
        click.UsageError: its bytes were not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise click.UsageError(f"{name} is not valid UTF-8") from None
    return text


def _flag(kind: GrammarKind) -> str:
    return f"--{kind.value.replace('_', '-')}"


def _read(path: Path, flag: str) -> str:
    try:
        return path.read_bytes().decode()  # line ends as they are: they are tokens too
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"can not be read: {error.strerror}"
        raise click.UsageError(f"{flag}: {path} {reason}") from None
