"""Everything that is wrong with a call's requests, named at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from specdec.engine.validation import validate_request
from specdec.errors import InvalidRequestError, PromptTooLongError, ViolationCollector
from specdec.types import EngineInfo, Request


def validate(requests: Sequence[Request], info: EngineInfo, seen: ViolationCollector) -> None:
    """Refuse ``requests``, which differ in their prompts only, for what ``seen`` holds and the engine would refuse.

    Raises:
        InvalidRequestError: with every bad field, under the engine's names where the engine found it.
        PromptTooLongError: nothing else is wrong, but a prompt does not fit the context.
    """
    longest = max(len(request.prompt_ids) for request in requests)
    for request in requests:
        fits = len(request.prompt_ids) < info.max_context
        # A prompt that is refused for its length is not looked through: it may be of any length.
        checked = request if fits else dataclasses.replace(request, prompt_ids=(0,))
        try:
            validate_request(checked, info.vocab_size, info.max_context, info.drafters)
        except InvalidRequestError as error:
            known = {violation.field for violation in seen.violations}
            seen.violations += [violation for violation in error.violations if violation.field not in known]
    seen.raise_if_any()
    if longest >= info.max_context:
        raise PromptTooLongError(info.max_context - 1, longest)
