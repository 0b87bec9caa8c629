"""`specdec serve`: the server, from loading to drain."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import shutil
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from specdec.cli.options import server_options
from specdec.config import Config

if TYPE_CHECKING:
    from server.serving import Addresses
    from specdec.types import EngineInfo


@click.command("serve")
@server_options
@click.option("--quiet", is_flag=True, help="Log warnings and errors only.")
def serve_command(config: Config, quiet: bool) -> None:
    """Serve a model over gRPC until SIGTERM or Ctrl-C; then running requests are finished first."""
    from server.serving import Serving
    from specdec.models.load_tokenizer import load_tokenizer
    from specdec.models.progress_bar import ProgressBar

    logging.basicConfig(
        level=logging.WARNING if quiet else logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    engine = config.engine
    click.echo(f"loading {engine.target} ...", err=True)
    with ExitStack() as bars:
        progress = bars.enter_context(ProgressBar())

        async def serve() -> None:
            serving = Serving(config, lambda: load_tokenizer(engine.target, engine.cache_dir), progress=progress)

            def on_ready(addresses: Addresses, info: EngineInfo) -> None:
                bars.close()
                click.echo("\n".join(ready_lines(addresses, info, serving.knows_chat)))

            await serving.run(on_ready)

        asyncio.run(serve())
    click.echo("stopped", err=True)


def ready_lines(addresses: Addresses, info: EngineInfo, knows_chat: bool) -> list[str]:
    """What a person needs when the server is ready, a client command to paste among it."""
    drafters = ", ".join(info.drafters) or "none"
    host = _reachable(addresses.host)
    ask = '--chat "Why is the sky blue?"' if knows_chat else '"Once upon a time"'
    http = addresses.http_port
    return [
        f"ready: {info.target}, {info.dtype}, {info.kernels} kernels, {info.numeric_mode}, drafters: {drafters}",
        f"  gRPC  {host}:{addresses.grpc_port}",
        *([f"  HTTP  http://{host}:{http}/readyz"] if http is not None else []),
        f"  try   {_program()} generate --server {host}:{addresses.grpc_port} {ask}",
    ]


def _reachable(host: str) -> str:
    """An address of this machine for one that means all of them."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _program() -> str:
    """How the reader's shell finds this very program: by name where that works, else by path."""
    script = sys.argv[0]
    if script.endswith(".py"):
        return f"{shlex.quote(sys.executable)} -m specdec.cli.main"
    found = shutil.which("specdec")
    if found is not None and os.path.exists(script) and os.path.samefile(found, script):
        return "specdec"
    return shlex.quote(os.path.relpath(script))
