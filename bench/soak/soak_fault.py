"""What a server does that it must not."""

from __future__ import annotations

from specdec.errors import SpecdecError


class SoakFault(SpecdecError):  # noqa: N818 - the server's fault, not an error of ours
    """A call that hangs, breaks without a reason, or ends in half; the message says which."""
