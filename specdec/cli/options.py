"""Command-line options that several commands share: the configuration; a client's server, key and certificates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec.config import Config, EngineConfig, ServerConfig, load_config
from specdec.core.types import Request

if TYPE_CHECKING:
    from specdec.client.connection import Credentials


Command = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A request whose prompt and prediction are still text."""

    prompt: str
    chat: bool
    """Put the prompt into the model's chat template."""
    prediction: str
    """The expected output; empty: none."""
    request: Request
    """The other fields, without token ids."""


_Option = tuple[str, str, dict[str, Any], str]

_ENGINE: tuple[_Option, ...] = (
    ("--config", "config_file", {"type": click.Path(exists=True, dir_okay=False, path_type=Path)},
     "YAML file with `engine:` (or `engines:`) and `server:`."),
    ("--target", "engine.target", {}, "HF folder, .gguf file, hub id or catalogue name."),
    ("--draft", "engine.draft", {},
     "Small model for the `model` drafter, of any vocabulary: same forms as --target, or `auto`."),
    ("--draft-dtype", "engine.draft_dtype", {"type": click.Choice(["auto", "int4", "int8", "bf16", "fp32"])},
     "The draft model's numeric type; default int4 beside a target in auto or int8."),
    ("--draft-vocab", "engine.draft_vocab", {"type": click.IntRange(min=0)},
     "Most frequent tokens that the draft model's output table keeps; 0: all."),
    ("--draft-head", "engine.draft_head", {}, "EAGLE-3 checkpoint folder for the `head` drafter."),
    ("--dtype", "engine.dtype", {"type": click.Choice(["auto", "int8", "bf16", "fp32"])},
     "Weights' numeric type on a CPU; auto: a quantised file as it is, else int8."),
    ("--kernels", "engine.kernels", {"type": click.Choice(["auto", "native", "reference"])},
     "Which kernels to run on the CPU."),
    ("--device", "engine.device", {"type": click.Choice(["auto", "cpu", "cuda"])}, "Where the target runs."),
    ("--device-dtype", "engine.device_dtype", {"type": click.Choice(["auto", "bf16", "fp16", "fp8"])},
     "Weights' numeric type on a GPU."),
    ("--kv-dtype", "engine.kv_dtype", {"type": click.Choice(["auto", "fp32", "bf16", "int8", "fp8"])},
     "Numeric type of the KV cache."),
    ("--threads", "engine.threads", {"type": int}, "Compute threads; 0: all cores."),
    ("--tp", "engine.tp", {"type": click.IntRange(1)}, "Processes over which the target is cut: one per NUMA node."),
    ("--kv-tokens", "engine.kv_tokens", {"type": int}, "Tokens the KV cache holds; 0: by free memory."),
    ("--max-context", "engine.max_context", {"type": int}, "Longest sequence; 0: the model's, at most 8192."),
    ("--cache-dir", "engine.cache_dir", {"type": click.Path(path_type=Path)}, "Downloads and built artefacts."),
    ("--trace-file", "engine.speculation.trace_file", {"type": click.Path(dir_okay=False, path_type=Path)},
     "Write every step's drafting decision here, as JSON lines for `specdec trace`."),
)  # fmt: skip

# `specdec generate` has a --speculation of its own, for its one request.
_SWITCH: tuple[_Option, ...] = (
    ("--speculation/--no-speculation", "engine.speculation.enabled", {}, "Off: plain decoding, whatever is asked for."),
)

_DRAFTERS = (
    "none, grammar, prediction, suffix, index, model, head, or oracle:P (tests and benchmarks: right with chance P); "
    "may be repeated."
)

_INDEX = "NAME=FILE: draft from FILE, which `specdec index` wrote; requests choose it by NAME. May be repeated."

_SERVER: tuple[_Option, ...] = (
    ("--host", "server.host", {}, "Address to listen on."),
    ("--grpc-port", "server.grpc_port", {"type": int}, "gRPC port; 0: any free one."),
    ("--http-port", "server.http_port", {"type": int}, "HTTP port, for OpenAI's API and others; 0: any free one."),
    ("--drain", "server.drain_s", {"type": float}, "Seconds a stop waits for running requests."),
    ("--reflection/--no-reflection", "server.reflection", {}, "gRPC reflection."),
)  # fmt: skip


def engine_options(command: Command) -> Command:
    """Add the engine's options to ``command``, which receives ``engine_config``, validated."""

    @functools.wraps(command)
    def wrapper(**values: Any) -> Any:
        name = values.pop("model")
        return command(engine_config=engine_named(pop_config(values), name), **values)

    return add_engine_options(model_option(_add(wrapper, _SWITCH)))


_MODEL = (
    "Name of one of several models: of --server, or of the `engines` of --config. Default: the first that can do it."
)


def model_option(command: Command) -> Command:
    """Add ``--model`` to ``command``, which receives ``model``, empty where it is not given."""
    return click.option("--model", default="", metavar="NAME", help=_MODEL)(command)


def engine_named(config: Config, name: str) -> EngineConfig:
    """The engine called ``name``; the first where that is empty.

    Raises:
        click.UsageError: the configuration has none of the name.
    """
    if name and name not in config.engines:
        raise click.UsageError(f"--model: --config names no engine {name!r} in `engines`")
    return config.engines[name] if name else config.engine


def server_options(command: Command) -> Command:
    """Add the engine's and the server's options to ``command``, which receives ``config``, validated."""

    @functools.wraps(command)
    def wrapper(**values: Any) -> Any:
        config = pop_config(values)
        return command(config=config, **values)

    return add_engine_options(_add(_add(wrapper, _SERVER), _SWITCH))


def add_engine_options(command: Command) -> Command:
    """Add the engine's options to ``command``, which gives its keyword arguments to `pop_config` itself."""
    drafter = click.option("--drafter", "--drafters", multiple=True, help=_DRAFTERS)
    index = click.option("--index", multiple=True, help=_INDEX)
    return _add(drafter(index(command)), _ENGINE)


def pop_config(values: dict[str, Any]) -> Config:
    """Take what the options of this module put into ``values`` out of it, as a configuration.

    Raises:
        ConfigError: a value is out of range, or the configuration file is bad; names every such field.
    """
    drafters, indexes = drafter_names(values.pop("drafter")), _index_files(values.pop("index"))
    file = values.pop("config_file")
    prefixes = ("engine__", "server__")
    given = {name.replace("__", "."): values.pop(name) for name in list(values) if name.startswith(prefixes)}
    overrides = {name: value for name, value in given.items() if value != ()}  # repeated options that were not given
    if drafters:
        overrides["engine.speculation.drafters"] = drafters
    if indexes:
        overrides["engine.indexes"] = indexes
    return load_config(file, overrides)


def _index_files(given: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, equals, file = text.partition("=")
        if not (name and equals and file):
            raise click.UsageError(f"--index: {text} must be NAME=FILE")
        found[name] = file
    return found


def flag_of(name: str) -> str:
    """The flag that fills ``name``, a keyword argument of a command."""
    return next(flag for flag, dotted, _, _ in (*_ENGINE, *_SWITCH, *_SERVER) if dotted.replace(".", "__") == name)


def drafter_names(given: tuple[str, ...]) -> tuple[str, ...]:
    """The names in repeated or comma-separated options."""
    return tuple(name.strip() for text in given for name in text.split(",") if name.strip())


def _add(command: Command, options: tuple[_Option, ...]) -> Command:
    for flag, name, settings, text in reversed(options):
        command = click.option(flag, name.replace(".", "__"), default=None, help=text, **settings)(command)
    return command


server_option = click.option(
    "--server",
    default=f"127.0.0.1:{ServerConfig.model_fields['grpc_port'].default}",
    show_default=True,
    metavar="HOST:PORT",
    help="gRPC address of a running `specdec serve`.",
)

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OPTIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--key-file", {"type": _FILE}, "File that holds the server's key, as `specdec keys new` printed it."),
    ("--tls", {"is_flag": True}, "The server speaks TLS."),
    ("--ca", {"type": _FILE}, "PEM authorities that the server's certificate must be of; default: the usual ones."),
    ("--cert", {"type": _FILE}, "PEM certificate to show to a server that asks for one."),
    ("--cert-key", {"type": _FILE}, "PEM private key of --cert."),
)


def credential_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to ``command``, which gives its keyword arguments to `pop_credentials`."""
    for flag, settings, text in reversed(_OPTIONS):
        command = click.option(flag, help=text, **settings)(command)
    return command


def pop_credentials(values: dict[str, Any]) -> Credentials:
    """Take what the options put into ``values`` out of it.

    Raises:
        click.UsageError: an option means nothing without another.
    """
    from specdec.client.connection import Credentials

    key_file, tls, ca, cert, cert_key = _credential_values(values).values()
    if not tls and (ca or cert or cert_key):
        raise click.UsageError("--ca, --cert and --cert-key mean nothing without --tls")
    if (cert is None) != (cert_key is None):
        raise click.UsageError("--cert and --cert-key belong together: give both, or neither")
    return Credentials(read_key("--key-file", key_file), tls, ca, cert, cert_key)


def refuse_credentials(values: dict[str, Any]) -> None:
    """Take what the options put into ``values`` out of it, where no server is asked.

    Raises:
        click.UsageError: one was given.
    """
    given = [flag for flag, value in _credential_values(values).items() if value]
    if given:
        raise click.UsageError(f"{', '.join(given)}: mean nothing without --server")


def _credential_values(values: dict[str, Any]) -> dict[str, Any]:
    return {flag: values.pop(flag.lstrip("-").replace("-", "_")) for flag, _, _ in _OPTIONS}


def read_key(option: str, file: Path | None) -> str:
    """The key in a file that ``option`` named; empty where none did.

    Raises:
        click.UsageError: it can not be read, or holds something else.
    """
    if file is None:
        return ""
    try:
        key = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{option}: {file} can not be read ({error})") from None
    if not key or len(key.split()) != 1:
        raise click.UsageError(f"{option}: {file} must hold one key and nothing else")
    return key


def check_folder(option: str, file: Path | None) -> None:
    """Raises click.UsageError: the folder of what ``option`` is to write is not there; said before the work."""
    if file is not None and not file.absolute().parent.is_dir():
        raise click.UsageError(f"{option}: {file.parent} is not a folder")
