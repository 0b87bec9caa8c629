"""Command-line options that several commands share: they fill the one validated configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from specdec.config import load_config

_OPTIONS = (
    ("--config", "config_file", {"type": click.Path(exists=True, dir_okay=False, path_type=Path)},
     "YAML file with `engine:` and `server:`."),
    ("--target", "engine.target", {}, "HF folder, .gguf file, hub id or catalogue name."),
    ("--draft", "engine.draft", {}, "Model for the `model` drafter; same vocabulary as the target."),
    ("--dtype", "engine.dtype", {"type": click.Choice(["int8", "bf16", "fp32"])}, "Weights' numeric type."),
    ("--kernels", "engine.kernels", {"type": click.Choice(["auto", "native", "reference"])}, "Which kernels to run."),
    ("--threads", "engine.threads", {"type": int}, "Compute threads; 0: all cores."),
    ("--kv-tokens", "engine.kv_tokens", {"type": int}, "Tokens the KV cache holds."),
    ("--max-context", "engine.max_context", {"type": int}, "Longest sequence; 0: the model's, at most 8192."),
    ("--cache-dir", "engine.cache_dir", {"type": click.Path(path_type=Path)}, "Downloads and built artefacts."),
)  # fmt: skip


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the engine's options to ``command``, which receives ``engine_config``, validated."""

    @functools.wraps(command)
    def wrapper(drafter: tuple[str, ...], config_file: Path | None, **values: Any) -> Any:
        overrides = {name.replace("__", "."): values.pop(name) for name in list(values) if name.startswith("engine__")}
        if drafter:
            overrides["engine.speculation.drafters"] = drafter
        elif overrides.get("engine.draft") is not None:
            overrides["engine.speculation.drafters"] = ("suffix", "model")
        return command(engine_config=load_config(config_file, overrides).engine, **values)

    for flag, name, settings, text in reversed(_OPTIONS):
        wrapper = click.option(flag, name.replace(".", "__"), default=None, help=text, **settings)(wrapper)
    return click.option("--drafter", multiple=True, help="none, suffix or model; may be repeated.")(wrapper)
