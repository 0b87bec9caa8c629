"""Rewrite a given function or file: most of the output is known before, and sent along as the prediction."""

from __future__ import annotations

from bench.workloads.bench_prompt import BenchPrompt
from bench.workloads.sources import source_of
from bench.workloads.workload_unavailable_error import WorkloadUnavailableError
from specdec.models.tokenizer import Tokenizer
from specdec.types import StoppingParams

MAX_TOKENS = 640
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


def edit_prompts(tokenizer: Tokenizer, count: int, max_tokens: int | None = None) -> list[BenchPrompt]:
    """The first ``count`` edits as chat prompts, the old text as the prediction.

    Raises:
        WorkloadUnavailableError: the model has no chat template.
    """
    if not tokenizer.has_chat_template:
        raise WorkloadUnavailableError("the model has no chat template; take an instruct model")
    return [_prompt(tokenizer, place, wish, max_tokens or MAX_TOKENS) for place, wish in EDITS[:count]]


def _prompt(tokenizer: Tokenizer, place: str, wish: str, max_tokens: int) -> BenchPrompt:
    old = source_of(place)
    part = "file" if place.endswith(":") else "code"
    question = f"{wish} Return the whole {part}, only code, without an explanation.\n\n```python\n{old}```"
    ids = tokenizer.encode_chat([{"role": "user", "content": question}])
    prediction = tuple(tokenizer.encode(old, add_special=False))
    room = len(prediction) * 5 // 4 + MARGIN
    return BenchPrompt(f"edit/{place}", tuple(ids), StoppingParams(max_tokens=min(max_tokens, room)), prediction)
