"""Traces of requests: JSON lines, as `specdec serve --capture` writes them or people do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specdec.config import problems
from specdec.core.fields import MAX_NAME, MAX_PROMPT_TOKENS, UINT32, UINT64
from specdec.errors import ConfigError
from specdec.load.arrivals import BLOCK_TOKENS

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Text = Annotated[str, Field(min_length=1)]
CAPTURE_PREFIX, CAPTURE_SUFFIX = "capture-", ".jsonl"  # of the files that a server writes
_PROMPTS = ("prompt", "prompt_ids", "messages", "prefix", "prompt_blocks")


class TraceTurn(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(strict=True)

    role: Text
    content: str


class TraceLine(BaseModel):
    """A recorded request. Exactly one of the five kinds of prompt is given."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")

    offset_s: float = Field(0.0, ge=0)
    """Arrival in seconds, after any time that is the same for all lines; without it all arrive at once."""
    name: str = ""
    prompt: str | None = None
    prompt_ids: list[Token] | None = Field(None, min_length=1)
    """The target's tokens."""
    messages: list[TraceTurn] | None = Field(None, min_length=1)
    prefix: str | None = None
    """The text before a gap; ``suffix`` is that after it."""
    suffix: str = ""
    prompt_blocks: list[str] | None = None
    """Names of the prompt's first blocks of 64 tokens, equal for equal beginnings; it has ``prompt_tokens``."""
    prompt_tokens: int = Field(1, ge=1, le=MAX_PROMPT_TOKENS)
    max_tokens: int | None = Field(None, ge=1, le=UINT32)
    stop: list[Text] = []
    fixed: bool = False
    """The answer has ``max_tokens`` tokens."""
    prediction: str = ""
    prediction_ids: list[Token] = []
    """The prediction as the target's tokens, instead of ``prediction``."""
    session: str = Field("", max_length=MAX_NAME)
    salt: str = Field("", max_length=MAX_NAME)
    model: str = ""
    seed: int | None = Field(None, ge=0, le=UINT64)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=UINT32)
    was_tokens: int = Field(0, ge=0)
    """Tokens of the recorded answer; 0: not known."""
    was_first_s: float | None = Field(None, ge=0)
    """Seconds to its first token."""

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        if sum(getattr(self, name) is not None for name in _PROMPTS) != 1:
            raise ValueError(f"exactly one of {', '.join(_PROMPTS)} is needed")
        if self.prompt_blocks is not None and self.prompt_tokens < BLOCK_TOKENS * len(self.prompt_blocks):
            raise ValueError(f"prompt_tokens must be at least {BLOCK_TOKENS} for each of prompt_blocks")
        return self


def read_trace_lines(path: Path) -> list[tuple[str, TraceLine]]:
    """The requests of a file, or of the captures in a folder, by arrival, each with its file and line. The first one's
    offset becomes 0.

    Raises:
        ConfigError: the file cannot be read or holds no request, or a line is invalid; names the line and the field.
    """
    found: list[tuple[str, TraceLine]] = []
    for file in _files(path):
        for number, line in enumerate(_text(file).split("\n"), 1):  # `splitlines` also splits at U+2028, legal in JSON
            place = f"{file.name}, line {number}"
            try:
                if line.strip():
                    found.append((place, TraceLine.model_validate_json(line)))
            except ValidationError as error:
                raise ConfigError(f"trace: {place}: {problems(error, TraceLine)}") from None
    if not found:
        raise ConfigError(f"trace: {path} holds no request")
    found.sort(key=lambda placed: placed[1].offset_s)
    start_s = found[0][1].offset_s
    for _, request in found:
        request.offset_s -= start_s
    return found


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if _is_captured(file))
    if not found:
        raise ConfigError(f"trace: {path} has no captured requests; start the server with --capture {path}")
    return found


def _is_captured(file: Path) -> bool:
    number = file.name.removeprefix(CAPTURE_PREFIX).removesuffix(CAPTURE_SUFFIX)
    return file.name == f"{CAPTURE_PREFIX}{number}{CAPTURE_SUFFIX}" and number.isdecimal()


def _text(file: Path) -> str:
    try:
        data = file.read_bytes()
        if _is_captured(file):
            data = data[: data.rfind(b"\n") + 1]  # a server died within the line behind it, or still writes it
        return data.decode("utf-8-sig")  # editors on Windows begin files with a mark
    except OSError as error:
        if isinstance(error, FileNotFoundError) and _is_captured(file):  # a running server deletes the oldest
            return ""
        raise ConfigError(f"trace: {file} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"trace: {file} is not UTF-8 text") from None
