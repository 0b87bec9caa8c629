"""Everything that is wrong with a request, named at once: what the wire can get wrong and what the engine refuses."""

from __future__ import annotations

from specdec.engine.validation import validate_request
from specdec.errors import FieldViolation, InvalidRequestError, PromptTooLongError, ViolationCollector
from specdec.types import EngineInfo, Request

MAX_REQUEST_ID_CHARACTERS = 128
# The engine's fields that have another path in the messages.
_PATHS = {
    "cache_salt": "cache.salt",
    "prediction": "prediction.token_ids",
    "target_tpot_ms": "scheduling.target_tpot_ms",
    "stopping.time_limit_s": "stopping.time_limit_ms",
    "stopping.decode_limit_s": "stopping.decode_time_limit_ms",
}


def validate(request: Request, info: EngineInfo, seen: ViolationCollector) -> None:
    """Refuse ``request`` for what ``seen`` holds already and for what the engine would refuse it.

    Raises:
        InvalidRequestError: with every bad field.
        PromptTooLongError: nothing else is wrong, but the prompt does not fit the context.
    """
    n = len(request.request_id)
    seen.check(n <= MAX_REQUEST_ID_CHARACTERS, "request_id", f"at most {MAX_REQUEST_ID_CHARACTERS} characters, got {n}")
    try:
        validate_request(request, info.vocab_size, info.max_context, info.drafters)
    except InvalidRequestError as error:
        known = {v.field for v in seen.violations}
        found = [FieldViolation(_PATHS.get(v.field, v.field), v.description) for v in error.violations]
        seen.violations += [v for v in found if v.field not in known]
    except PromptTooLongError:
        seen.raise_if_any()
        raise
    seen.raise_if_any()
