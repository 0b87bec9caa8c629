"""A part of a real file that is typed anew, with all that stands around it."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from bench.workloads.sources import source_of


@dataclass(frozen=True, slots=True)
class Stretch:
    """``typed`` comes between ``before`` and ``after``, key by key."""

    name: str
    before: str
    typed: str
    after: str


def find_stretch(place: str, keys: int) -> Stretch:
    """``keys`` characters of the file at ``place``, from the first statement of a function near its middle on.

    Raises:
        ValueError: there is no such file, or no function after which so much text follows.
    """
    source = source_of(place)
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    begins = sorted(starts[_first_statement(node) - 1] for node in functions)
    fitting = [begin for begin in begins if begin + keys <= len(source)]
    if not fitting:
        raise ValueError(f"{place}: no function with {keys} characters from its begin to the file's end")
    begin = min(fitting, key=lambda b: abs(b - len(source) // 2))
    begin += len(source[begin:]) - len(source[begin:].lstrip(" "))  # an editor indents by itself
    return Stretch(place, source[:begin], source[begin : begin + keys], source[begin + keys :])


def _first_statement(function: ast.FunctionDef) -> int:
    """Line of the first statement that is no docstring, counted from 1."""
    first = function.body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return function.body[1].lineno if is_text and len(function.body) > 1 else first.lineno
