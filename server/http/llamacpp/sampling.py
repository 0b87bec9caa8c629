"""How llama.cpp's clients ask for tokens to be chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

from server.http.body import Body
from server.http.fields.sampling import read_seed
from specdec.engine.validation import MAX_N
from specdec.types import SamplingParams

_INT31 = (1 << 31) - 1
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = 0.8, 40, 0.95, 0.05  # llama.cpp's own defaults


def read_samples(body: Body) -> int:
    """``n_cmpl``, how many samples; llama.vscode looks for these very words where it is out of range."""
    value = body.raw("n_cmpl")
    if value is None:
        return 1
    if type(value) is int and 1 <= value <= MAX_N:
        return value
    got = str(value)[:20]
    body.refuse("n_cmpl", f"Field 'n_cmpl': Value must be between 1 <= value <= {MAX_N}, but got {got}")
    return 1


def read_llama_sampling(body: Body) -> SamplingParams:
    """The fields of llama.cpp and its defaults. With a list ``samplers``, only what it names is on; where that is
    ``infill`` without a temperature, one sample is greedy: that sampler, too, takes what is likeliest to be meant."""
    n, asked = read_samples(body), _samplers(body)
    temperature, top_k = body.number("temperature"), body.integer("top_k", -1, _INT31)
    top_p, min_p = body.number("top_p"), body.number("min_p")
    if temperature is None:
        temperature = _temperature(asked, n)
    chosen = SamplingParams(
        temperature=max(0.0, temperature),
        top_k=0 if _off("top_k", asked) else max(0, _TOP_K if top_k is None else top_k),
        top_p=1.0 if _off("top_p", asked) else _TOP_P if top_p is None else top_p,
        min_p=0.0 if _off("min_p", asked) else _MIN_P if min_p is None else min_p,
        seed=read_seed(body),
        n=n,
    )
    body.names["sampling.repetition_penalty"] = body.path("repeat_penalty")
    penalties: dict[str, Any] = {
        "repetition_penalty": body.number("repeat_penalty"),
        "presence_penalty": body.number("presence_penalty"),
        "frequency_penalty": body.number("frequency_penalty"),
    }
    given: dict[str, Any] = {name: value for name, value in penalties.items() if value is not None}
    return dataclasses.replace(chosen, **given)


def _temperature(asked: tuple[str, ...] | None, n: int) -> float:
    if asked is None or "temperature" in asked:
        return _TEMPERATURE
    return 0.0 if "infill" in asked and n == 1 else 1.0


def _samplers(body: Body) -> tuple[str, ...] | None:
    """None where no list is given; the former form, a text of one letter each, is not looked at."""
    return body.texts("samplers") if isinstance(body.raw("samplers"), list) else None


def _off(name: str, asked: tuple[str, ...] | None) -> bool:
    return asked is not None and name not in asked
