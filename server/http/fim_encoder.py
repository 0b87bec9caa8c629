"""What the HTTP face needs in order to fill in the middle of a text."""

from __future__ import annotations

from typing import Protocol

from specdec.errors import RequestError


class FimNotSupportedError(RequestError):
    """Nothing can be filled in here; the message says why and what to do instead."""

    reason = "FIM_NOT_SUPPORTED"


class FimEncoder(Protocol):
    """Puts what stands before and after a gap into a prompt that asks for what is missing."""

    def encode(self, prefix: str, suffix: str) -> list[int]:
        """Token ids of the prompt; special tokens spelled out in the texts stay plain text.

        Raises:
            RequestError: the model can not fill in (`FimNotSupportedError`), or not this.
        """
