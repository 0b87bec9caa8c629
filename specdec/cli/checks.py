"""`specdec doctor`: what this machine is; `specdec verify`: path identity on a real model."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
import time
from dataclasses import dataclass

import click

from specdec.cli.bench_output import count_option, print_table, progress_line
from specdec.cli.options import ScreenCommand, engine_options
from specdec.config import EngineConfig
from specdec.control_groups import available_bytes, usable_cores

PAGE_TOKENS = 64  # a sequence needs a page of the KV cache beyond its context, for a tree
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "gguf", "grpcio", "numpy")


_SCREEN = {
    "Model": ("--config", "--model", "--target", "--draft", "--dtype", "--kv-dtype"),
    "Machine": ("--device", "--threads", "--kv-tokens", "--max-context"),
}


@click.command("doctor", cls=ScreenCommand, screen=_SCREEN)
@engine_options
def doctor_command(engine_config: EngineConfig) -> None:
    """Check device, kernels, numeric self-test, memory bandwidth, what the model needs and can reach, and versions.

    Exit code 1: the model does not fit, or the configuration cannot be served.
    """
    import psutil
    from rich.console import Console

    from bench.machine import BandwidthProbe
    from specdec.engine.memory import host_kv_dtype
    from verify_kernels.backend_selection import load_kernels, self_test

    console = Console(highlight=False, markup=False)
    threads = engine_config.threads or usable_cores()
    console.print(f"machine      {platform.machine()}, {threads} threads, Python {platform.python_version()}")
    total = psutil.virtual_memory().total
    console.print(f"memory       {available_bytes() / 2**30:.1f} GiB free here, the machine has {total / 2**30:.1f}")
    console.print(f"vector unit  {', '.join(vector_features()) or 'none detected'}")
    kernels = load_kernels(engine_config.kernels, engine_config.cache_dir, threads)
    console.print(f"kernels      {kernels.name}")
    for kind in ("auto", "int8", "bf16", "fp32"):
        console.print(f"self-test    {kind}: {self_test(kernels.backend(), kind, host_kv_dtype(engine_config))}")
    rate = 0.0
    if kernels.name == "native":
        probe = BandwidthProbe(engine_config.cache_dir, threads)
        rate = max(probe.once() for _ in range(3))  # the best: noise only slows a read
        console.print(f"memory read  {rate / 1e9:.1f} GB/s")
    outlook = find_outlook(engine_config, rate)
    for word, line in outlook.lines:
        console.print(f"{word:12} {line}", soft_wrap=True)
    for name in PACKAGES:
        try:
            console.print(f"{name:12} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            console.print(f"{name:12} not installed")
    if not outlook.servable:
        raise click.ClickException("this configuration cannot be served here; `needs` above says why")


@dataclass(frozen=True, slots=True)
class Outlook:
    """What can be expected of a configuration: ``lines`` of a word and a text; ``servable``: it is not known that it
    cannot be served."""

    lines: list[tuple[str, str]]
    servable: bool = True


def find_outlook(config: EngineConfig, bytes_per_s: float) -> Outlook:
    """Memory that an engine of ``config`` needs, how much it holds at a time, and how fast it can be at most where
    memory is read at ``bytes_per_s`` (0: not known); nothing is fetched to find that out."""
    from specdec.engine.memory import measure_draft, plan_memory
    from specdec.engine.platform import context_limit, target_device
    from specdec.errors import ConfigError, ModelError
    from specdec.models.load import checked_tokenizer
    from specdec.models.memory import measure_model
    from specdec.models.progress import silent
    from specdec.models.resolve import is_here, resolve, with_named_draft

    try:
        config = with_named_draft(config)
        missing = [name for name in (config.target, config.draft) if name and not is_here(name, config.cache_dir)]
        if missing:
            return Outlook([("needs", f"not known: {name} is not here; {_fetch_hint(name)}") for name in missing])
        on_device = target_device(config) is not None
        target = measure_model(config.target, dtype=config.dtype, cache_dir=config.cache_dir)
        tokenizer = checked_tokenizer(resolve(config.target, config.cache_dir, silent), target.config, config.cache_dir)
        budget = plan_memory(config, on_device=on_device, tokenizer=tokenizer)
        context = context_limit(config.model_copy(update={"kv_tokens": budget.kv_tokens}), target.config)
        draft = None if on_device else measure_draft(config, target.config, tokenizer)
        if draft is not None and config.draft is not None and config.speculation.enabled:
            checked_tokenizer(resolve(config.draft, config.cache_dir, silent), draft.config, config.cache_dir)
    except (ModelError, ConfigError) as error:
        return Outlook([("needs", f"not known: {error}")], servable=False)
    lines = [("needs", line) for line in (*budget.lines(), "it fits" if budget.fits else "it does not fit")]
    if on_device:
        lines.append(("sequences", "a GPU's memory is looked at when the server starts"))
    else:
        held = min(config.max_batch, budget.kv_tokens // (context + PAGE_TOKENS))
        rule = f"{budget.kv_tokens} tokens of KV cache, by {budget.kv_rule}"
        lines.append(("sequences", f"{held} of {context} tokens at a time, {config.max_batch} shorter ones ({rule})"))
        level = None if draft is None or target.config.experts else draft.read_bytes  # rows choose experts of their own
        lines += [("speed", line) for line in speed_lines(bytes_per_s, target.read_bytes, level)]
    return Outlook(lines, budget.fits)


def speed_lines(bytes_per_s: float, target: int, draft: int | None) -> list[str]:
    """What the bandwidth of memory allows, and what a draft model must be worth. target, draft: bytes that a step of
    the target and a level of the draft model's trees read."""
    lines = []
    if bytes_per_s > 0:
        lines.append(
            f"at most {bytes_per_s / target:.0f} tokens/s without drafts: a step reads {target / 1e9:.2f} GB of weights"
        )
    if draft is not None:
        # One more token to verify costs nothing where memory is the limit, so a level's price is its own reading.
        lines.append(
            f"the draft model pays where more than {draft / target:.0%} of its tokens are accepted: a level reads "
            f"{draft / 1e9:.2f} GB"
        )
    return lines


def _fetch_hint(name: str) -> str:
    from specdec.models.catalogue import CATALOGUE

    return f"specdec models fetch {name}" if name in CATALOGUE else "it is fetched when it is first served"


def vector_features() -> list[str]:
    """The instruction sets that matter to the kernels, as the processor reports them."""
    from verify_kernels.cpu.library import cpu_flags

    wanted = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "asimd", "i8mm")
    present = set(cpu_flags().split())
    return [name for name in wanted if name in present]


@click.command("verify")
@engine_options
@count_option("-n", "--pairs", default=120, help="Request pairs to compare at least.")
@count_option("--max-tokens", default=40, help="Longest output of one request.")
@click.option("--seed", default=0, show_default=True, help="Chooses prompts, parameters and seeds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def verify_command(engine_config: EngineConfig, pairs: int, max_tokens: int, seed: int, as_json: bool) -> None:
    """Check path identity: the same tokens and log-probabilities with and without speculation, in any batch."""
    from bench.path_identity import verify
    from specdec.cli.progress_bar import load_parts

    began = time.perf_counter()
    parts = load_parts(engine_config)
    report = verify(parts, pairs=pairs, max_tokens=max_tokens, seed=seed, say=progress_line())
    seconds = time.perf_counter() - began
    if as_json:
        click.echo(json.dumps({**report.as_dict(), "seconds": round(seconds, 1)}))
    else:
        print_table(*report.table())
        for mismatch in report.mismatches[:1]:
            click.echo(f"first mismatch: {mismatch}")
        click.echo(
            f"{report.total('pairs')} pairs, {report.total('tokens')} tokens, {report.total('accepted')} of them "
            f"drafted, {report.total('preemptions')} preemptions, {len(report.mismatches)} mismatches "
            f"({seconds:.0f} s, {parts.info.numeric_mode})"
        )
    sys.exit(1 if report.mismatches else 0)
