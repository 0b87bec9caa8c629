"""`specdec doctor`: what this machine is; `specdec verify`: path identity on a real model."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
import time

import click

from specdec.cli.options import engine_options
from specdec.config import EngineConfig

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "gguf", "grpcio", "numpy")


@click.command("doctor")
@engine_options
def doctor_command(engine_config: EngineConfig) -> None:
    """Check device, kernels, numeric self-test, memory bandwidth and versions."""
    import os

    import psutil
    from rich.console import Console

    from bench.machine import BandwidthProbe
    from specdec.engine.memory import host_kv_dtype
    from verify_kernels.kernels import load_kernels, self_test

    console = Console()
    threads = engine_config.threads or len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory()
    console.print(f"machine      {platform.machine()}, {threads} threads, Python {platform.python_version()}")
    console.print(f"memory       {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free")
    console.print(f"vector unit  {', '.join(vector_features()) or 'none detected'}")
    kernels = load_kernels(engine_config.kernels, engine_config.cache_dir, threads)
    console.print(f"kernels      {kernels.name}")
    for kind in ("auto", "int8", "bf16", "fp32"):
        console.print(f"self-test    {kind}: {self_test(kernels.backend(), kind, host_kv_dtype(engine_config))}")
    if kernels.name == "native":
        rate = BandwidthProbe(engine_config.cache_dir, threads).measure()
        console.print(f"memory read  {rate / 1e9:.1f} GB/s")
    for line in memory_lines(engine_config):
        console.print(f"needs        {line}", highlight=False)
    for name in PACKAGES:
        try:
            console.print(f"{name:12} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            console.print(f"{name:12} not installed")


def memory_lines(config: EngineConfig) -> list[str]:
    """What an engine of ``config`` would need of memory; nothing is fetched to find that out."""
    from specdec.engine.build import target_device
    from specdec.engine.memory import plan_memory
    from specdec.errors import ModelError
    from specdec.models.catalogue import with_named_draft
    from specdec.models.resolve import is_here

    try:
        config = with_named_draft(config)
    except ModelError as error:
        return [f"not known: {error}"]
    missing = [name for name in (config.target, config.draft) if name and not is_here(name, config.cache_dir)]
    if missing:
        return [f"not known: {name} is not here; specdec models fetch {name}" for name in missing]
    try:
        budget = plan_memory(config, on_device=target_device(config) is not None)
    except ModelError as error:
        return [f"not known: {error}"]
    return [*budget.lines(), "it fits" if budget.fits else "it does not fit"]


def vector_features() -> list[str]:
    """The instruction sets that matter to the kernels, as the processor reports them."""
    wanted = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "asimd", "i8mm")
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            line = next((text for text in file if text.startswith(("flags", "Features"))), "")
    except OSError:
        return []
    present = set(line.split())
    return [name for name in wanted if name in present]


@click.command("verify")
@engine_options
@click.option("-n", "--pairs", default=120, show_default=True, help="Request pairs to compare at least.")
@click.option("--max-tokens", default=40, show_default=True, help="Longest output of one request.")
@click.option("--seed", default=0, show_default=True, help="Chooses prompts, parameters and seeds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def verify_command(engine_config: EngineConfig, pairs: int, max_tokens: int, seed: int, as_json: bool) -> None:
    """Check path identity: the same tokens and log-probabilities with and without speculation, in any batch."""
    from rich.console import Console

    from specdec.cli.progress_bar import ProgressBar
    from specdec.engine.build import build_parts
    from specdec.path_identity import verify

    console = Console(stderr=True)
    began = time.perf_counter()
    with ProgressBar() as progress:
        parts = build_parts(engine_config, progress)
    report = verify(parts, pairs=pairs, max_tokens=max_tokens, seed=seed, say=console.print)
    seconds = time.perf_counter() - began
    if as_json:
        click.echo(json.dumps({**report.as_dict(), "seconds": round(seconds, 1)}))
    else:
        Console().print(report.table())
        for mismatch in report.mismatches[:1]:
            click.echo(f"first mismatch: {mismatch}")
        click.echo(
            f"{report.pairs} pairs, {report.tokens} tokens, {report.accepted} of them drafted, "
            f"{report.preemptions} preemptions, {len(report.mismatches)} mismatches ({seconds:.0f} s, "
            f"{parts.info.numeric_mode})"
        )
    sys.exit(1 if report.mismatches else 0)
