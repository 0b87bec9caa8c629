"""`specdec lsp`: a language server that suggests code, for editors to start."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sys
from functools import partial
from typing import Any

import click

from specdec.cli.options import credential_options, pop_credentials, server_option

_LEVELS = ("debug", "info", "warning", "error")


@click.command("lsp")
@server_option
@credential_options
@click.option("--stdio", is_flag=True, help="Speak over standard input and output, as is done in any case.")
@click.option("--log-level", type=click.Choice(_LEVELS), default="warning", show_default=True,
              help="Log level of standard error. User text is never logged.")  # fmt: skip
def lsp_command(server: str, stdio: bool, log_level: str, **values: Any) -> None:
    """Speak LSP 3.18 (textDocument/inlineCompletion), and Copilot's inline edits, over standard input and output.

    An editor starts it. Settings come from the editor: initializationOptions, or workspace/didChangeConfiguration under
    "specdec".
    """
    from server.lsp.language_server import run_stdio
    from specdec.client.client import Client
    from specdec.client.connection import RetryPolicy

    client = partial(Client, credentials=pop_credentials(values), retry=RetryPolicy(attempts=1), workspace=_workspace())
    client(server)  # refuses an empty address, or a file that cannot be read, before the editor waits
    logging.basicConfig(level=log_level.upper(), stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    addresses = server.split(",")  # a session that fails is followed by one on the next server
    code = run_stdio(lambda failures: client(addresses[failures % len(addresses)]))
    sys.stderr.flush()
    os._exit(code)  # an editor waits for this process, and gRPC's threads may keep a busy machine's interpreter waiting


def _workspace() -> str:
    """The same whenever the editor starts again in this folder, for a proxy in front of several servers; says nothing
    of the folder's name."""
    try:
        place = os.getcwd()
    except OSError:  # it was removed
        place = ""
    return hashlib.blake2b(f"{platform.node()}\0{os.getuid()}\0{place}".encode(), digest_size=16).hexdigest()
