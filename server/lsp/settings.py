"""What an editor may configure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

SECTION = "specdec"
_SECRETS = (".env", ".env.*", "*.pem", "*.key", "id_rsa", "id_ed25519")


class Settings(BaseModel):
    """Names are camelCase on the wire. Unknown ones are ignored: editors send more than is meant for us.

    ``mode``: suggest while the user types and when asked to, only when asked to, or never. ``fill``: fill in or be
    refused where the model can not; else continue what is in front of the cursor there; or do that in any case.
    ``max_prompt_tokens`` None: the server's default. ``context_files``, ``context_characters``: of other documents.
    ``exclude``: names of files that are neither completed nor shown to the model.
    """

    model_config = ConfigDict(alias_generator=to_camel, frozen=True, extra="ignore", strict=True)

    mode: Literal["auto", "manual", "off"] = "auto"
    debounce_ms: Annotated[float, Field(ge=0, le=10_000)] = 10.0
    max_lines: Annotated[int, Field(ge=1, le=1000)] | None = 12
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 96
    time_limit_ms: Annotated[float, Field(gt=0, le=600_000)] | None = 2000.0
    max_prompt_tokens: Annotated[int, Field(ge=64)] | None = None
    fill: Literal["middle", "middle_or_prefix", "prefix"] = "middle_or_prefix"
    speculation: Literal["auto", "on", "off"] = "auto"
    context_files: Annotated[int, Field(ge=0, le=64)] = 6
    context_characters: Annotated[int, Field(ge=0, le=1 << 20)] = 6000
    exclude: Annotated[tuple[str, ...], Field(strict=False)] = _SECRETS
    disabled_languages: Annotated[tuple[str, ...], Field(strict=False)] = ()
    model: str = ""
    cache_salt: str = ""


def read_settings(told: Any, former: Settings | None = None) -> tuple[Settings, list[str]]:
    """Settings as an editor tells them, alone or under "specdec", and what is wrong with them; what is wrong or not
    told is as in ``former`` (None: the defaults)."""
    values = dict(told) if isinstance(told, dict) else {}
    if isinstance(values.get(SECTION), dict):
        values = values[SECTION]
    base = {} if former is None else former.model_dump(by_alias=True)
    try:
        return Settings.model_validate(base | values), []
    except ValidationError as error:
        found = error.errors()
        bad = {str(problem["loc"][0]) for problem in found}
        problems = [f"{SECTION}.{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in found]
        return Settings.model_validate(base | {name: v for name, v in values.items() if name not in bad}), problems
