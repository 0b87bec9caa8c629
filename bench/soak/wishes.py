"""What visitors ask for: requests of all kinds, none of them wrong."""

from __future__ import annotations

from bench.soak.place import Place
from specdec.client.generate_options import GenerateOptions
from specdec.types import (
    GrammarKind,
    GrammarParams,
    OutputParams,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)

_SCHEMA = '{"type":"object","properties":{"name":{"type":"string","maxLength":12},"n":{"type":"integer"}}}'
_GRAMMARS = (
    GrammarParams(GrammarKind.JSON_SCHEMA, _SCHEMA),
    GrammarParams(GrammarKind.REGEX, "[a-z]{3,12}( [a-z]{1,8}){0,4}"),
    GrammarParams(GrammarKind.CHOICE, '["yes","no","perhaps"]'),
    GrammarParams(GrammarKind.JSON_OBJECT),
)
_STOPS = (("\n\n",), ("def ", "class "), (" ",))
SALTS = ("", "left", "right")


def some_options(place: Place) -> tuple[GenerateOptions, int]:
    """Options of one request, and its number of samples."""
    draw = place.random
    samples = draw.choice((1, 1, 1, 1, 2, 3))
    options = GenerateOptions(
        sampling=SamplingParams(
            temperature=draw.choice((0.0, 0.0, 0.8)), n=samples, top_k=draw.choice((0, 20)),
            repetition_penalty=draw.choice((1.0, 1.0, 1.1)), seed=draw.randrange(1 << 32),
        ),
        stopping=StoppingParams(
            max_tokens=draw.choice((1, 8, 24, 48)), stop=draw.choice((*_STOPS, (), ())),
            time_limit_s=draw.choice((None, None, None, 2.0)),
        ),
        output=OutputParams(logprobs=draw.choice((None, None, None, 5)), trees=draw.random() < 0.05),
        speculation=SpeculationParams(draw.choice(tuple(SpeculationMode))), cache_salt=draw.choice(SALTS),
        priority=draw.choice((0, 0, 1)), target_tpot_ms=draw.choice((None, None, 30.0)),
    )  # fmt: skip
    if draw.random() < 0.3:
        options["grammar"] = draw.choice(_GRAMMARS)
    if draw.random() < 0.2:
        options["prediction"] = place.cut(400)
    if draw.random() < 0.3:
        options["session"] = f"soak-{draw.randrange(4)}"
    return options, samples


def some_body(place: Place, *, stream: bool) -> tuple[dict[str, object], int]:
    """The same for OpenAI's dialect, without the prompt."""
    draw = place.random
    samples = draw.choice((1, 1, 1, 2))
    body: dict[str, object] = {
        "max_tokens": draw.choice((1, 8, 24, 48)), "temperature": draw.choice((0.0, 0.8)), "n": samples,
        "stream": stream, "seed": draw.randrange(1 << 31), "cache_salt": draw.choice(SALTS),
    }  # fmt: skip
    if draw.random() < 0.3:
        body["stop"] = list(draw.choice(_STOPS))
    if draw.random() < 0.2:
        body["response_format"] = {"type": "json_object"}
    return body, samples
