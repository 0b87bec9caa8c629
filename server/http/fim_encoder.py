"""What the HTTP face needs in order to fill in the middle of a text."""

from __future__ import annotations

from typing import Protocol

from server.completion.gap import FillMode, Gap
from server.completion.packed_prompt import PackedPrompt
from specdec.errors import RequestError


class FimNotSupportedError(RequestError):
    """Nothing can be filled in here; the message says why and what to do instead."""

    reason = "FIM_NOT_SUPPORTED"


class FimEncoder(Protocol):
    """Makes a gap in a text a prompt; `server.completion.prompt_packer.PromptPacker` is one."""

    def budget(self, wanted: int | None, max_tokens: int) -> int:
        """Tokens for a prompt where ``wanted`` were asked for and ``max_tokens`` are to be written."""

    def pack(self, gap: Gap, mode: FillMode, budget: int, owner: str = "", *, heal: bool = True) -> PackedPrompt:
        """The prompt for ``gap``, at most ``budget`` tokens; special tokens spelled out in texts stay plain text.

        Raises:
            RequestError: the model can not fill in (`FimNotSupportedError`), or not this.
        """
