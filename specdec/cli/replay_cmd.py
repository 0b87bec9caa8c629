"""`specdec replay`: ask a trace again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specdec.cli.bench_serve_cmd import reporting_options, run_load
from specdec.cli.credential_options import credential_options

_POSITIVE = click.FloatRange(min=0, min_open=True)
_WARMS_UP = "shared-prefix"  # texts that any model continues, and nothing of the trace, which would be cached then


@click.command("replay")
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--url", required=True, help="grpc://HOST:PORT (ours), or http://HOST:PORT/v1 (any OpenAI endpoint).")
@click.option("--speed", type=_POSITIVE, default=1.0, show_default=True, help="2 takes half the time.")
@credential_options
@reporting_options
def replay_command(trace: Path, speed: float, **values: Any) -> None:
    """Send the requests of TRACE at the times they came, and measure how long answers take.

    TRACE is of `specdec capture`, or JSON lines or msgpack of your own: objects with offset_s and prompt, prompt_ids,
    messages, or prefix and suffix. Reports as `specdec bench serve` does.
    """
    run_load(values, trace=trace, speed=speed, workload=_WARMS_UP)
