"""Runs the language server over standard input and output."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import BinaryIO

from server.lsp.language_server import InlineLanguageServer
from specdec.client.client import Client


def run_stdio(connect: Callable[[], Client]) -> int:
    """Serve one editor until it goes; the exit code that LSP asks for. Standard output belongs to the protocol:
    whatever else is printed in this process goes to standard error."""
    # pygls logs every message, and that is the user's text.
    logging.getLogger("pygls").setLevel(logging.CRITICAL)
    server = InlineLanguageServer(connect)
    server.start_io(sys.stdin.buffer, private_stdout())
    return 0 if server.clean else 1


def private_stdout() -> BinaryIO:
    """A file for what was standard output, which now is standard error."""
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return out
