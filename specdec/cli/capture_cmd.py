"""`specdec capture`: a trace of what a running server was asked."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path

import click

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@click.command("capture")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Trace to write.")
@click.option("--last", help="Only what came in the last 30s, 10m, 2h or 1d.")
@click.option("--for", "during", help="Wait so long (30s, 10m, 2h), and take what comes in that time.")
def capture_command(folder: Path, out: Path, last: str | None, during: str | None) -> None:
    """Make a trace of the requests that came to a server with `specdec serve --capture FOLDER`.

    It holds arrival times, lengths, parameters, and which prompts begin alike; prompts only where the server was
    started with --capture-prompts. `specdec replay` and `specdec ab run` ask it again.
    """
    from server.capture.capture_files import files, read_entries
    from server.capture.make_trace import make_trace

    if last is not None and during is not None:
        raise click.UsageError("--last looks back and --for ahead; give one of them")
    if not files(folder):
        raise click.ClickException(f"{folder}: holds no captured requests; start the server with --capture {folder}")
    since_s, until_s = -math.inf, math.inf
    if last is not None:
        since_s = time.time() - _seconds("--last", last)
    elif during is not None:
        since_s = time.time()
        until_s = since_s + _seconds("--for", during)
        time.sleep(until_s - since_s)
    try:
        lines = [json.dumps(line) for line in make_trace(read_entries(folder), since_s, until_s)]
        if lines:
            out.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from None
    if not lines:
        raise click.ClickException(f"{folder}: no request came in that time")
    words = sum('"prompt_ids"' in line for line in lines)
    click.echo(f"{len(lines)} requests, {words} of them with their prompts: {out}")


def _seconds(option: str, text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None:
        raise click.UsageError(f"{option}: give a time such as 30s, 10m, 2h or 1d, not {text!r}")
    return float(found[1]) * _UNITS[found[2]]
