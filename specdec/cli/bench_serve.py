"""`specdec bench serve`: load on a running server; `specdec replay`: recorded requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bench.serve import ARRIVALS, SERVE_WORKLOADS
from specdec.cli.bench_output import count_option, json_file_option, number_option, print_table, reported
from specdec.cli.options import POSITIVE, WholeNumber, credential_options, pop_credentials
from specdec.core.fields import UINT32

if TYPE_CHECKING:
    from bench.serve.load import ServePlan, ServeReport
    from specdec.client.connection import Credentials


_REPORTING = (
    number_option("--temperature", default=0.0, help="0: greedy."),
    click.option(
        "--speculation",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        show_default=True,
        help="specdec servers only.",
    ),
    click.option("--model", default="", help="One of several that the server has; default: the first that it lists."),
    click.option(
        "--goodput", "goodput", multiple=True, help="Objective METRIC:MS with ttft, tpot, itl or e2e; may be repeated."
    ),
    count_option("--warm-up", default=4, least=0, help="Uncounted requests before the run."),
    click.option(
        "--timeout", type=POSITIVE, default=120.0, show_default=True, help="Time limit of a request in seconds."
    ),
    click.option(
        "--deadline",
        type=POSITIVE,
        help="Deadline of a request in seconds; the server refuses what it cannot finish by then. Over gRPC only.",
    ),
    click.option(
        "--max-slip",
        type=POSITIVE,
        default=10.0,
        show_default=True,
        help="Delay of the generator at p99, in ms, above which the run is invalid (exit code 3).",
    ),
    json_file_option("Write all figures to this file, each request's too."),
    click.option("--quiet", is_flag=True, help="No progress line."),
)  # fmt: skip


def reporting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `run_load` that every kind of load has."""
    for option in reversed(_REPORTING):
        command = option(command)
    return command


@click.command("serve")
@click.option("--url", required=True, help="grpc://HOST:PORT (specdec), or http://HOST:PORT/v1 (any OpenAI endpoint).")
@click.option("--workload", type=click.Choice(SERVE_WORKLOADS), default="humaneval", show_default=True)
@click.option("--concurrency", type=click.IntRange(min=1), help="Closed loop: concurrent requests; default 1.")
@click.option(
    "--requests", type=click.IntRange(min=1), help="Closed loop: number of requests; default 32 without --duration."
)
@click.option("--duration", type=POSITIVE, help="Seconds during which requests are sent; default 30 with --rate.")
@click.option("--rate", type=POSITIVE, help="Open loop: requests per second.")
@click.option("--arrivals", type=click.Choice(ARRIVALS), help="Of an open loop; default: poisson.")
@click.option(
    "--shape",
    type=POSITIVE,
    help="Shape of gamma arrivals: below 1 in bursts, 1 Poisson, above 1 more regular; default 0.5.",
)
@click.option(
    "--max-tokens", type=WholeNumber(1, UINT32), help="Length limit of an answer; default: the workload's own."
)
@click.option("--fixed-length", is_flag=True, help="Every answer has --max-tokens tokens; stops are ignored.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the arrivals.")
@credential_options
@reporting_options
def serve_load_command(**values: Any) -> None:
    """Send requests to a server and measure its answers.

    A closed loop without --rate; `specdec replay` sends recorded requests. Times count from the scheduled time of a
    request, so delays by a slow server are included.
    """
    run_load(values, **_asked(values))


def run_load(values: dict[str, Any], **asked: Any) -> None:
    """Put load on a server and report, after Ctrl-C too. Exits with 3 if the run is invalid.

    values: the options of `reporting_options` and `credential_options`, and ``url``. asked: the other fields of
    `ServePlan`.

    Raises:
        click.UsageError: an option's value is invalid.
        SpecdecError: the server does not answer, or the prompts are not available.
    """
    from bench.serve.load import ServePlan, report_tables
    from specdec.load.request import Objective

    credentials = pop_credentials(values)
    plan = ServePlan(
        **asked, warm_up=values["warm_up"], timeout_s=values["timeout"],
        objectives=tuple(Objective.read(text) for text in values["goodput"]), max_slip_ms=values["max_slip"],
    )  # fmt: skip
    report = asyncio.run(_run(plan, credentials, values))
    faults = report.faults()
    with reported(report.as_dict(), values["json_file"], report.stopped):
        for fault in faults:
            click.secho(f"INVALID: {fault}", fg="red", bold=True)
        if not faults:
            click.secho("valid: the generator kept up", fg="green")
        for table in report_tables(report):
            print_table(*table)
    if faults:
        raise SystemExit(3)


def _asked(values: dict[str, Any]) -> dict[str, Any]:
    from specdec.load.arrivals import Arrivals, shape_of

    rate, duration, requests = values["rate"], values["duration"], values["requests"]
    named, shape = values["arrivals"], values["shape"]
    if shape is not None and named != "gamma":
        raise click.UsageError("--shape is for --arrivals gamma")
    arrivals = None
    if rate is not None:
        if requests is not None:
            raise click.UsageError("--requests is for a closed loop; an open one ends after --duration")
        if values["concurrency"] is not None:
            raise click.UsageError("--concurrency is for a closed loop; an open one has no limit")
        arrivals = Arrivals(rate, duration or 30.0, shape_of(named or "poisson", shape or 0.5))
    elif named is not None:
        raise click.UsageError("--arrivals is for an open loop; give --rate")
    elif requests is None and duration is None:
        requests = 32
    return {
        "workload": values["workload"], "at_once": values["concurrency"] or 1, "requests": requests,
        "duration_s": duration, "arrivals": arrivals, "max_tokens": values["max_tokens"],
        "fixed": values["fixed_length"], "seed": values["seed"],
    }  # fmt: skip


async def _run(plan: ServePlan, credentials: Credentials, values: dict[str, Any]) -> ServeReport:
    from bench.serve.endpoints import ServerUrl, connect
    from bench.serve.load import progress_line, run_plan
    from specdec.cli.progress_bar import LiveLine
    from specdec.client.prompt import GenerateOptions
    from specdec.core.types import SpeculationMode, SpeculationParams

    speculation, temperature, deadline_s = values["speculation"], values["temperature"], values["deadline"]
    asked = GenerateOptions(speculation=SpeculationParams(SpeculationMode(speculation)))
    if deadline_s is not None:
        if ServerUrl.read(values["url"]).protocol != "grpc":
            raise click.UsageError("--deadline is for grpc:// URLs; over HTTP a request has none")
        asked["timeout_s"] = deadline_s
    # Other servers refuse unknown fields.
    extra = {} if speculation == "auto" else {"speculation": {"mode": speculation}}
    endpoint, about = await connect(
        values["url"], credentials, asked, extra, model=values["model"], temperature=temperature
    )
    about |= {"url": values["url"], "temperature": temperature, "speculation": speculation, "deadline_s": deadline_s}
    clock = asyncio.get_running_loop().time
    try:
        with LiveLine(quiet=values["quiet"]) as line:
            watch = (lambda run: line.show(progress_line(run, clock()))) if line.shows else None
            return await run_plan(
                plan, endpoint, about=about, watch=watch, note=lambda text: line.note(f"left out {text}")
            )
    finally:
        await endpoint.close()


@click.command("replay")
@click.argument("trace", type=click.Path(exists=True, path_type=Path))
@click.option("--url", required=True, help="grpc://HOST:PORT (specdec), or http://HOST:PORT/v1 (any OpenAI endpoint).")
@click.option("--speed", type=POSITIVE, default=1.0, show_default=True, help="2 takes half the time.")
@credential_options
@reporting_options
def replay_command(trace: Path, speed: float, **values: Any) -> None:
    """Send the requests of TRACE at their recorded times, and measure the answers.

    TRACE is the folder of `specdec serve --capture`, or a file of JSON lines: objects with one of prompt, prompt_ids,
    messages, prefix (and suffix), or prompt_blocks with prompt_tokens. Further fields are optional: offset_s (without
    it all are sent at once), name, max_tokens, fixed, stop, prediction or prediction_ids, session, salt, model, seed,
    temperature, top_p, top_k, min_p, was_tokens and was_first_s. Others are refused. The report is that of `specdec
    bench serve`.

    Not replayed: grammars, penalties, logit_bias, stop tokens, rules of a text's layout, min_tokens, time limits,
    priorities, speculation, and samples after the first. Over HTTP also sessions, and predictions of captured
    requests, which are token ids.
    """
    # Warms up with plain texts, because prompts of the trace would then be cached.
    run_load(values, trace=trace, speed=speed, workload="shared-prefix")
