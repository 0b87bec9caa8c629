"""Command-line options that several commands share: the configuration; a client's server, key and certificates."""

from __future__ import annotations

import asyncio
import functools
import math
import re
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic.fields import FieldInfo

from specdec.config import Config, EngineConfig, ServerConfig, load_config, read_key
from specdec.errors import ConfigError

if TYPE_CHECKING:
    from specdec.client.client import Client
    from specdec.client.connection import Credentials


Command = Callable[..., Any]
Ask = Callable[[Callable[["Client"], Awaitable[Any]]], Any]
CONNECT_S = 10.0


def check_text(text: str, name: str) -> str:
    """``text`` as it is, which came from the command line.

    Raises:
        click.UsageError: its bytes were not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise click.UsageError(f"{name} is not valid UTF-8") from None
    return text


class _Text(click.ParamType):
    """Text whose bytes were UTF-8."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return check_text(value, param.opts[0] if param is not None else self.name)


TEXT = _Text()


# Options that set one field of the configuration: flag, and the field by its dotted name. Type, bounds and help are
# the field's own.
_ConfigOption = tuple[str, str]

_ENGINE: tuple[_ConfigOption, ...] = (
    ("--target", "engine.target"),
    ("--draft", "engine.draft"),
    ("--draft-dtype", "engine.draft_dtype"),
    ("--draft-vocab", "engine.draft_vocab"),
    ("--draft-head", "engine.draft_head"),
    ("--dtype", "engine.dtype"),
    ("--kernels", "engine.kernels"),
    ("--device", "engine.device"),
    ("--device-dtype", "engine.device_dtype"),
    ("--kv-dtype", "engine.kv_dtype"),
    ("--threads", "engine.threads"),
    ("--kv-tokens", "engine.kv_tokens"),
    ("--max-context", "engine.max_context"),
    ("--cache-dir", "engine.cache_dir"),
    ("--trace-file", "engine.speculation.trace_file"),
)

# `specdec generate` has a --speculation of its own, for its one request.
_SWITCH: tuple[_ConfigOption, ...] = (("--speculation/--no-speculation", "engine.speculation.enabled"),)

_DRAFTERS = (
    "none, grammar, prediction, suffix, index, model (also a parallel one), head, or oracle:P (tests and benchmarks: "
    "right with chance P); may be repeated."
)

_CONFIG = "YAML file with `engine:` (or `engines:`) and `server:`."
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_INDEX = "NAME=FILE: draft from FILE, which `specdec index` wrote; requests choose it by NAME. May be repeated."

_SERVER: tuple[_ConfigOption, ...] = (
    ("--host", "server.host"),
    ("--grpc-port", "server.grpc_port"),
    ("--http-port", "server.http_port"),
    ("--drain", "server.drain_s"),
)


def engine_options(command: Command) -> Command:
    """Add the engine's options to ``command``, which receives ``engine_config``, validated."""

    @functools.wraps(command)
    def wrapper(**values: Any) -> Any:
        name = values.pop("model")
        return command(engine_config=engine_named(pop_config(values), name), **values)

    return add_engine_options(model_option(config_options(wrapper, _SWITCH)))


_MODEL = (
    "Name of one of several models: of --server, or of the `engines` of --config. Default: the first that can do it."
)


def model_option(command: Command) -> Command:
    """Add ``--model`` to ``command``, which receives ``model``, empty where it is not given."""
    return click.option("--model", type=TEXT, default="", metavar="NAME", help=_MODEL)(command)


def engine_named(config: Config, name: str) -> EngineConfig:
    """The engine called ``name``; the first if it is empty. If there are no `engines`, ``name`` is a target.

    Raises:
        click.UsageError: the configuration has no engine of that name, or another target.
    """
    if name and not config.engines:
        if config.engine.target not in (EngineConfig().target, name):
            raise click.UsageError(f"--model {name}: the target is already {config.engine.target}; give one of them")
        return config.engine.model_copy(update={"target": name})
    if name and name not in config.engines:
        raise click.UsageError(f"--model: {name!r} is not in `engines` of --config: {', '.join(config.engines)}")
    return config.engines[name] if name else config.engine


def add_server_options(command: Command) -> Command:
    """Add the engine's and the server's options to ``command``, which gives its keyword arguments to `pop_config`."""
    return add_engine_options(config_options(config_options(command, _SERVER), _SWITCH))


def add_engine_options(command: Command) -> Command:
    """Add the engine's options to ``command``, which gives its keyword arguments to `pop_config` itself."""
    drafter = click.option("--drafter", "--drafters", type=TEXT, multiple=True, help=_DRAFTERS)
    index = click.option("--index", type=TEXT, multiple=True, help=_INDEX)
    file = click.option("--config", "config_file", type=_FILE, help=_CONFIG)
    return file(config_options(drafter(index(command)), _ENGINE))


def pop_config(values: dict[str, Any]) -> Config:
    """Take what the options of this module put into ``values`` out of it, as a configuration.

    Raises:
        ConfigError: a value is out of range, or the configuration file is bad; names every such field.
        click.UsageError: a target is given besides a file with `engines`.
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
    config = load_config(file, overrides)
    if config.engines and overrides.get("engine.target") is not None:
        raise click.UsageError(
            f"MODEL and --target cannot be used with the `engines` of {file}, which have targets of their own; "
            "change engines.NAME.target there"
        )
    return config


def _index_files(given: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, equals, file = text.partition("=")
        if not (name and equals and file):
            raise click.UsageError(f"--index: {text} must be NAME=FILE")
        found[name] = file
    return found


def drafter_names(given: tuple[str, ...]) -> tuple[str, ...]:
    """The names in repeated or comma-separated options."""
    return tuple(name.strip() for text in given for name in text.split(",") if name.strip())


def config_options(command: Command, options: Sequence[_ConfigOption]) -> Command:
    """Add an option for each of these fields to ``command``; one that is not given leaves the field alone."""
    for flag, dotted in reversed(options):
        field = _field(dotted)
        settings = {"type": _parameter_type(field), "multiple": typing.get_origin(field.annotation) is tuple}
        if dotted.endswith("_s"):
            settings["metavar"] = "SECONDS"
        if field.annotation is bool:
            settings = {} if "/" in flag else {"is_flag": True}
        text = f"{field.description}."
        # An option cannot be null: what null means holds where the option is not given, or is set in a file only.
        text = text.replace("null:", "default:") if field.default is None else re.sub("; null:.*", ".", text)
        text = text if re.match(r"gRPC|\w+:", text) else text[0].upper() + text[1:]
        name, default = dotted.replace(".", "__"), _shown_default(field)
        command = click.option(flag, name, default=None, help=text, show_default=default, **settings)(command)
    return command


def _field(dotted: str) -> FieldInfo:
    model: Any = Config
    *sections, name = dotted.split(".")
    for section in sections:
        model = model.model_fields[section].annotation
    found: FieldInfo = model.model_fields[name]
    return found


def _shown_default(field: FieldInfo) -> str | bool:
    """The default, for the help; False where the help of the field says it already."""
    says_nothing = field.default in (None, (), "", "auto", 0) or isinstance(field.default, bool)
    return False if says_nothing else str(field.default)


def _parameter_type(field: FieldInfo) -> Any:
    """click's type for the values of a field, with the field's bounds."""
    annotation = field.annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation,) = (part for part in typing.get_args(annotation) if part is not type(None))
    if typing.get_origin(annotation) is typing.Literal:
        return click.Choice(list(typing.get_args(annotation)))
    if annotation is Path:
        return click.Path(path_type=Path)
    bounds = {
        name: getattr(rule, name) for rule in field.metadata for name in ("ge", "gt", "le") if hasattr(rule, name)
    }
    lowest = bounds.get("gt", bounds.get("ge"))
    if annotation is int:
        return WholeNumber(lowest, bounds.get("le"))
    if annotation is float:
        return click.FloatRange(lowest, bounds.get("le"), min_open="gt" in bounds)
    return TEXT


class WholeNumber(click.IntRange):
    """A range whose upper bound the help leaves out where it is only that of the wire format."""

    def _describe_range(self) -> str:
        return "" if self.max in (2**32 - 1, 2**64 - 1) else super()._describe_range()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found: int = click.IntRange(self.min, self.max).convert(value, param, ctx)  # its errors name the whole range
        return found


class FiniteRange(click.FloatRange):
    """A range that refuses nan too, which is neither below nor above anything."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return found


# gRPC's clock has 64-bit nanoseconds: a much later deadline is a past one.
POSITIVE = FiniteRange(0, 10**9, min_open=True)


class ScreenCommand(click.Command):
    """A command whose ``--help`` shows what people use, in groups; ``--help-all`` shows every option.

    Args:
        screen: the flags to show, by the heading of their group.
    """

    def __init__(self, *args: Any, screen: Mapping[str, Sequence[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._screen = screen
        text = "Show every option and exit."
        option = click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, help=text)
        option.callback = _show_all
        self.params.append(option)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups; every other option behind them for ``--help-all``."""
        parameters = self.get_params(ctx)
        records = {flag: p.get_help_record(ctx) for p in parameters for flag in p.opts}
        groups = {**self._screen, "Help": ("--help-all", "--help")}
        if ctx.meta.get(_SHOWS_ALL):
            shown = {flag for flags in groups.values() for flag in flags}
            more = [p.opts[0] for p in parameters if isinstance(p, click.Option) and shown.isdisjoint(p.opts)]
            groups = {**self._screen, "More options": more}
        for heading, flags in groups.items():
            with formatter.section(heading):
                formatter.write_dl([record for flag in flags if (record := records[flag]) is not None])


class ScreenGroup(ScreenCommand, click.Group):
    """A group with options of its own, shown like those of a `ScreenCommand`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups of options, then the commands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


_SHOWS_ALL = "specdec.help_all"


def _show_all(ctx: click.Context, _: click.Parameter, given: bool) -> None:
    if given:
        ctx.meta[_SHOWS_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


_GRPC_PORT: int = ServerConfig.model_fields["grpc_port"].default


def read_server(_: click.Context, option: click.Parameter, text: str | None) -> str | None:
    """Return the value of --server as gRPC takes it: without scheme and path, with a port."""
    if text is None:
        return None
    if "https://" in text or "grpcs://" in text:
        raise click.BadParameter("give HOST:PORT without a scheme, and --tls", param=option)
    places = [one.strip().split("://")[-1].rstrip("/") for one in text.split(",")]
    places = [f"[{place}]" if place.count(":") > 1 and "]" not in place else place for place in places]  # IPv6
    for port in re.findall(r":(\d+)(?:,|$)", ",".join(places)):
        if int(port) > 65535:  # gRPC would dial another one
            raise click.BadParameter(f"{port} is no port; the last is 65535", param=option)
    return ",".join(place if re.search(r":\d+$", place) or not place else f"{place}:{_GRPC_PORT}" for place in places)


server_option = click.option(
    "--server",
    default=f"127.0.0.1:{_GRPC_PORT}",
    show_default=True,
    callback=read_server,
    metavar="HOST:PORT",
    help="gRPC address of a running `specdec serve`.",
)

_OPTIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--key-file", {"type": _FILE}, "File that holds the server's key, as `specdec keys new` printed it."),
    ("--tls", {"is_flag": True}, "The server speaks TLS; implied by the options that follow."),
    ("--ca", {"type": _FILE}, "PEM authorities that the server's certificate must be of; default: the usual ones."),
    ("--cert", {"type": _FILE}, "PEM certificate to show to a server that asks for one."),
    ("--cert-key", {"type": _FILE}, "PEM private key of --cert."),
)


def add_options(command: Command, options: Sequence[tuple[str, dict[str, Any], str]]) -> Command:
    """Add to ``command`` options by flag, click's settings and help."""
    for flag, settings, text in reversed(options):
        command = click.option(flag, help=text, **settings)(command)
    return command


def credential_options(command: Command) -> Command:
    """Add the options to ``command``, which gives its keyword arguments to `pop_credentials`."""
    return add_options(command, _OPTIONS)


def pop_credentials(values: dict[str, Any]) -> Credentials:
    """Take what the options put into ``values`` out of it.

    Raises:
        click.UsageError: an option means nothing without another, or the key's file is not one.
    """
    from specdec.client.connection import Credentials

    key_file, tls, ca, cert, cert_key = _credential_values(values).values()
    if (cert is None) != (cert_key is None):
        raise click.UsageError("--cert and --cert-key belong together: give both, or neither")
    return Credentials(given_key("--key-file", key_file), tls or bool(ca or cert), ca, cert, cert_key)


def asks_server(command: Command) -> Command:
    """Add the options of a server to ``command``, which receives ``model``, and ``ask`` in place of the others.

    ``ask(call)`` returns what ``call(client)`` returns, of a client of the server; it raises CallError.
    """

    @functools.wraps(command)
    def wrapper(*args: Any, server: str, **values: Any) -> Any:
        credentials = pop_credentials(values)

        def ask(call: Callable[[Client], Awaitable[Any]]) -> Any:
            from specdec.client.client import Client
            from specdec.client.connection import RetryPolicy

            async def run() -> Any:
                # At a terminal an unreachable server is reported at once; a full queue is worth waiting for.
                async with Client(server, credentials, RetryPolicy(unreachable=False)) as client:
                    return await call(client)

            return asyncio.run(run())

        return command(*args, ask=ask, **values)

    return server_option(model_option(credential_options(wrapper)))


def refuse_credentials(values: dict[str, Any]) -> None:
    """Take what the options put into ``values`` out of it, where no server is asked.

    Raises:
        click.UsageError: one was given.
    """
    if given := [flag for flag, value in _credential_values(values).items() if value]:
        raise click.UsageError(f"{', '.join(given)}: mean nothing without --server")


def _credential_values(values: dict[str, Any]) -> dict[str, Any]:
    return {flag: values.pop(flag.lstrip("-").replace("-", "_")) for flag, _, _ in _OPTIONS}


def given_key(option: str, file: Path | None) -> str:
    """The key in a file that ``option`` named; empty where none did. Raises click.UsageError as `read_key` does."""
    try:
        return "" if file is None else read_key(file, option)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


def check_folder(option: str, file: Path | None) -> None:
    """Raises click.UsageError: the folder of what ``option`` is to write is not there; said before the work."""
    if file is not None and not file.absolute().parent.is_dir():
        raise click.UsageError(f"{option}: {file.parent} is not a folder")
