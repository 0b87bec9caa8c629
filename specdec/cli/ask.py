"""What a user asks `specdec generate` for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from specdec.cli.options import drafter_names
from specdec.cli.texts import GRAMMAR_OPTIONS, PREDICTION_OPTIONS, check_text, pop_grammar, pop_prediction
from specdec.types import (
    OutputParams,
    Request,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)

_U32 = click.IntRange(0, 2**32 - 1)
_OPTIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--max-tokens", {"type": _U32, "default": 256, "show_default": True}, "Longest output."),
    ("--min-tokens", {"type": _U32, "default": 0}, "Shortest output."),
    ("--temperature", {"type": float, "default": 0.0, "show_default": True}, "0 is greedy."),
    ("--top-k", {"type": _U32, "default": 0}, "Keep the k likeliest tokens; 0: off."),
    ("--top-p", {"type": float, "default": 1.0}, "Keep the likeliest tokens of this total probability."),
    ("--min-p", {"type": float, "default": 0.0}, "Drop tokens below this share of the likeliest one's probability."),
    ("--repetition-penalty", {"type": float, "default": 1.0}, "Above 1: seen tokens become less likely."),
    ("--presence-penalty", {"type": float, "default": 0.0}, "Subtracted once per token of the output."),
    ("--frequency-penalty", {"type": float, "default": 0.0}, "Subtracted per occurrence in the output."),
    ("--seed", {"type": click.IntRange(0, 2**64 - 1)}, "Same seed, same tokens. Drawn when not given."),
    ("--n", {"type": click.IntRange(1, 2**32 - 1), "default": 1}, "Samples of the prompt."),
    ("--stop", {"multiple": True}, "Stop at this text; may be repeated."),
    ("--ignore-eos", {"is_flag": True}, "Do not stop at the model's end token."),
    ("--logprobs", {"type": _U32}, "Log-probabilities of the chosen and the k likeliest tokens; needs --json."),
    ("--speculation", {"type": click.Choice([m.value for m in SpeculationMode]), "default": "auto"},
     "Drafting: as the controller decides, never, or always up to the caps."),
    ("--max-nodes", {"type": _U32}, "Draft nodes of one tree."),
    ("--max-depth", {"type": _U32}, "Depth of one tree."),
    ("--width", {"type": _U32}, "Children per node."),
    ("--session", {"default": ""}, "Name of an editor or conversation whose earlier texts may be drafted from."),
    ("--target-tpot-ms", {"type": float}, "Milliseconds per token to keep to: drafts go to those that lag behind."),
    ("--timeout", {"type": float}, "Seconds after which the request is given up."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ask:
    """Prompt and prediction still in words (an empty prediction is none), and a request without their ids."""

    prompt: str
    chat: bool
    prediction: str
    request: Request


def ask_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the request's options to ``command``, which gives its keyword arguments to `pop_ask`."""
    for flag, settings, text in reversed((*_OPTIONS, *PREDICTION_OPTIONS, *GRAMMAR_OPTIONS)):
        command = click.option(flag, help=text, **settings)(command)
    return command


def pop_ask(prompt: str, chat: bool, request_id: str, values: dict[str, Any], drafters: tuple[str, ...]) -> Ask:
    """Take the request's options out of ``values``; ``drafters`` as `--drafter` gave them.

    Raises:
        click.UsageError: options contradict each other, or a text is not UTF-8.
    """
    return Ask(check_text(prompt, "the prompt"), chat, pop_prediction(values), _request(request_id, values, drafters))


def _request(request_id: str, values: dict[str, Any], drafters: tuple[str, ...]) -> Request:
    names = [flag.lstrip("-").replace("-", "_") for flag, _, _ in _OPTIONS]
    v = {name: values.pop(name) for name in names}
    sampling = (
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "seed", "n",
    )  # fmt: skip
    wanted = drafter_names(drafters)
    return Request(
        request_id=request_id,
        prompt_ids=(),
        sampling=SamplingParams(**{name: v[name] for name in sampling}),
        stopping=StoppingParams(v["max_tokens"], v["min_tokens"], tuple(v["stop"]), ignore_eos=v["ignore_eos"]),
        output=OutputParams(logprobs=v["logprobs"]),
        speculation=SpeculationParams(
            mode=SpeculationMode.OFF if wanted == ("none",) else SpeculationMode(v["speculation"]),
            drafters=tuple(name for name in wanted if name != "none") or None,
            max_nodes=v["max_nodes"],
            max_depth=v["max_depth"],
            width=v["width"],
        ),
        deadline_s=v["timeout"],
        session=check_text(v["session"], "--session"),
        target_tpot_ms=v["target_tpot_ms"],
        grammar=pop_grammar(values),
    )
