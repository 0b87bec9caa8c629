"""Fill in the middle: an editor asks for missing lines of a file, again and again in one session."""

from __future__ import annotations

import ast
from itertools import pairwise
from typing import NamedTuple

from bench.workloads.bench_prompt import BenchPrompt
from bench.workloads.sources import source_of
from bench.workloads.workload_unavailable_error import WorkloadUnavailableError
from specdec.models.tokenizer import Tokenizer
from specdec.types import StoppingParams

FILES = (
    "sched:", "graphlib:", "reprlib:", "netrc:", "fnmatch:", "linecache:", "rlcompleter:", "shelve:", "quopri:",
    "hmac:", "getpass:", "queue:", "colorsys:", "filecmp:", "code:",
)  # fmt: skip
HOLES = 3  # counted ones per file, after the one that warms the session
LINES = (2, 1, 3, 4)  # wished lengths of a file's holes
MAX_LINES = 6
PREFIX_TOKENS, SUFFIX_TOKENS = 1200, 400
MAX_TOKENS = 64
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
# Qwen's base models end a middle with whichever of these comes naturally.
ENDS = ("<|endoftext|>", "<|fim_pad|>", *MARKS, "<|repo_name|>", "<|file_sep|>")


class Hole(NamedTuple):
    """Missing text: the half-open range of lines, counted from 0."""

    first: int
    end: int


def fim_prompts(tokenizer: Tokenizer, count: int, max_tokens: int | None = None) -> list[BenchPrompt]:
    """At least ``count`` counted holes, `HOLES` per file. Each file is a session whose first hole only warms it.

    Raises:
        WorkloadUnavailableError: the model was not trained to fill in the middle.
    """
    stopping = fim_stopping(tokenizer, max_tokens)
    prompts: list[BenchPrompt] = []
    for place in FILES[: -(-count // HOLES)]:
        source = source_of(place)
        for number, hole in enumerate(find_holes(source, HOLES + 1)):
            ids = fim_ids(tokenizer, source, hole)
            name = f"fim/{place.removesuffix(':')}.py:{hole.first + 1}-{hole.end}"
            prompts.append(BenchPrompt(name, ids, stopping, session=place, counted=number > 0))
    return prompts


def fim_stopping(tokenizer: Tokenizer, max_tokens: int | None) -> StoppingParams:
    """When a middle ends.

    Raises:
        WorkloadUnavailableError: the model was not trained to fill in the middle.
    """
    if any(tokenizer.token_id(mark) is None for mark in MARKS):
        raise WorkloadUnavailableError(f"the model has no fill-in-the-middle tokens ({', '.join(MARKS)})")
    ends = tuple(found for name in ENDS if (found := tokenizer.token_id(name)) is not None)
    return StoppingParams(max_tokens=max_tokens or MAX_TOKENS, stop=("\n\n",), stop_token_ids=ends)


def find_holes(source: str, count: int) -> list[Hole]:
    """``count`` runs of whole statements inside functions, spread over the file, in its order; fewer when it is short.

    Their lengths follow `LINES` where the file has statements of that length.
    """
    runs = sorted(_runs(ast.parse(source)))
    if not runs:
        return []
    first, last = runs[0].first, runs[-1].first
    chosen: list[Hole] = []
    for number in range(count):
        wished = LINES[number % len(LINES)]
        around = first + (last - first) * (2 * number + 1) / (2 * count)
        later = [run for run in runs if not chosen or run.first >= chosen[-1].end]
        if not later:
            break
        chosen.append(_closest(later, around, wished))
    return chosen


def fim_ids(tokenizer: Tokenizer, source: str, hole: Hole, typed: float = 0.0) -> tuple[int, ...]:
    """Prefix, suffix, middle in Qwen's order, with the cursor behind the first missing line's indentation and so much
    of the missing text as was ``typed`` already (0 to 1)."""
    lines = source.splitlines(keepends=True)
    missing = "".join(lines[hole.first : hole.end])
    indent = len(missing) - len(missing.lstrip())
    there = missing[: indent + int(typed * len(missing.strip()))]
    before = tokenizer.encode("".join(lines[: hole.first]) + there, add_special=False)[-PREFIX_TOKENS:]
    after = tokenizer.encode("\n" + "".join(lines[hole.end :]), add_special=False)[:SUFFIX_TOKENS]
    prefix, suffix, middle = (_special(tokenizer, mark) for mark in MARKS)
    return (prefix, *before, suffix, *after, middle)


def _closest(runs: list[Hole], around: float, lines: int) -> Hole:
    """The run that starts near line ``around``; one line of length weighs as much as twenty of place."""
    return min(runs, key=lambda run: abs(run.first - around) + 20 * abs(run.end - run.first - lines))


def _special(tokenizer: Tokenizer, name: str) -> int:
    found = tokenizer.token_id(name)
    assert found is not None  # `fim_prompts` checks it
    return found


def _runs(tree: ast.Module) -> set[Hole]:
    """Every run of neighbouring statements of a function's blocks that is at most `MAX_LINES` long."""
    found: set[Hole] = set()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for block in (body for function in functions for body in _blocks(function)):
        if any(a.end_lineno == b.lineno for a, b in pairwise(block)):
            continue  # two statements on one line
        for start, opening in enumerate(block):
            for closing in block[start:]:
                assert closing.end_lineno is not None  # `ast.parse` gives every statement its place
                if closing.end_lineno - opening.lineno < MAX_LINES and not _is_text(opening):
                    found.add(Hole(opening.lineno - 1, closing.end_lineno))
    return found


def _blocks(function: ast.FunctionDef) -> list[list[ast.stmt]]:
    """Its body and the bodies of its compound statements, but for blocks written behind a colon."""
    blocks = [function.body]
    for node in ast.walk(function):
        blocks += [body for name in ("body", "orelse") if isinstance(body := getattr(node, name, None), list) and body]
    return [block for block in blocks if block[0].col_offset > 0 and block[0].lineno > function.lineno]


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
