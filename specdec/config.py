"""The one validated configuration: `EngineConfig` for the engine, `ServerConfig` for what people connect to."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.functional_validators import AfterValidator
from pydantic_core import ErrorDetails

from specdec.errors import ConfigError

Dtype = Literal["auto", "int8", "bf16", "fp32"]
WeightDtype = Literal["auto", "int3", "int4", "int8", "bf16", "fp32"]
DeviceDtype = Literal["auto", "bf16", "fp16", "fp8"]
KvDtype = Literal["auto", "fp32", "bf16", "int8", "fp8"]


Alias = Annotated[str, Field(pattern=r"^[!-~]{1,128}$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
# A path in which `~` is expanded; it stays where it names no user.
UserPath = Annotated[Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))]
LEAST_KV_TOKENS = 128


class Section(BaseModel):
    """A part of a configuration file: refuses unknown fields, infinite numbers, and true or false for other types."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _switches_are_no_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError(
                "must not be true or false, as which YAML also reads yes, no, on and off; write null for none, and "
                "put a text into quotes"
            )
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _sections_may_be_empty(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads a section with nothing under it, such as one with all fields commented out, as null."""
        default = cls.model_fields[info.field_name or ""].default
        return default if value is None and isinstance(default, Section | dict) else value


class SpeculationConfig(Section):
    """Which drafters are loaded, how far each request may draft, and how the controller behaves.

    ``drafters`` are tried together and their proposals merged into one tree. ``max_nodes``, ``max_depth`` and
    ``width`` bound the trees of requests that name no caps of their own.
    """

    enabled: bool = Field(
        True, description="draft at all; false: plain decoding for every request, no drafter is loaded"
    )
    drafters: tuple[str, ...] | None = Field(
        None,
        description="drafters to load, in order; null: grammar, prediction, suffix; index, model, head if given",
    )
    max_nodes: int = Field(31, ge=0, le=63, description="draft nodes per tree, without the pending token")
    max_depth: int = Field(31, ge=0, le=63, description="draft tokens in a row")
    width: int = Field(
        3, ge=1, le=16, description="children per node a drafter may propose", json_schema_extra={"unit": "nodes"}
    )
    profile_s: float = Field(3.0, ge=0, le=60, description="time at start to measure costs and drafts; 0: assume them")
    trace_file: UserPath | None = Field(
        None, description="JSON lines of a step's decision and tokens, for replay; former ones become FILE.1 to FILE.3"
    )
    shared_tokens: int = Field(
        262144,
        ge=0,
        description="finished text kept for other requests of a salt; each session keeps a quarter as much; 0: none",
    )


class EngineConfig(Section):
    """Everything the engine is built from. Sizes are in tokens unless a name says otherwise."""

    target: str = Field("smollm2-135m", min_length=1, description="HF folder, .gguf file, hub id or catalogue name")
    aliases: tuple[Alias, ...] = Field((), description="other names by which requests may ask for the model")
    draft: str | None = Field(
        None,
        description="small model that drafts, of any vocabulary: same forms as target; auto: what suits the target",
    )
    draft_dtype: WeightDtype | None = Field(
        None, description="weights of the draft model; default: int3 with a target in auto or int8, else the target's"
    )
    draft_vocab: int = Field(
        32768,
        ge=0,
        description="most frequent tokens that a draft model's output table keeps, where they are known; 0: all",
        json_schema_extra={"unit": "tokens"},
    )
    draft_head: str | None = Field(None, description="EAGLE-3 checkpoint folder for the `head` drafter")
    indexes: dict[Name, UserPath] = Field(
        {}, description="name: file that `specdec index` wrote, for the `index` drafter; requests choose by name"
    )
    dtype: Dtype = Field("auto", description="weights on a CPU; auto: a file's own blocks or 4 bits, else int8")
    kernels: Literal["auto", "native", "reference"] = Field("auto", description="kernels on a CPU")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the target runs; auto: on a GPU if any")
    device_dtype: DeviceDtype = Field(
        "auto", description="on a GPU: weights; auto: bf16. Weights of 4 bits keep them unless this is fp8"
    )
    kv_dtype: KvDtype = Field(
        "auto", description="KV cache; auto: bf16 on a CPU, as the rows on a GPU; fp32, int8: CPU only; fp8: GPU only"
    )
    strict: bool = Field(False, description="refuse to serve unless the numeric mode is `bitwise`")
    threads: int = Field(
        0,
        ge=0,
        description="compute threads; 0: one per core that this process may use, by affinity and CPU limits",
        json_schema_extra={"unit": "threads"},
    )
    cache_dir: UserPath = Field(Path("~/.cache/specdec"), description="downloads, packed weights, built kernels")

    max_context: int = Field(0, ge=0, description="prompt and output together; 0: the model's own limit, at most 8192")
    spare_bytes: int = Field(0, ge=0, description="memory left to other programs")
    kv_tokens: int = Field(
        0, ge=0, description="tokens the KV cache holds, from 128, rounded up to pages of 64; 0: by free memory"
    )
    prefix_cache: bool = Field(True, description="prompts that begin alike share their KV cache")
    kv_disk_bytes: int | None = Field(
        None, ge=0, description="bytes of prefix cache on disk, which a restart keeps; CPU only; 0: none; "
        "null: `specdec serve` without keys_file takes 4 GiB or a quarter of the free space, else none",
    )  # fmt: skip
    kv_disk_folder: UserPath | None = Field(None, description="folder for kv_disk_bytes; null: `prefix` in cache_dir")

    max_batch: int = Field(
        16, ge=1, le=256, description="sequences decoded together, at most", json_schema_extra={"unit": "sequences"}
    )
    max_step_rows: int = Field(
        256, ge=64, le=4096, description="rows of one forward: tree nodes and prompt tokens; on a GPU 1,024 unless set"
    )
    prefill_chunk: int = Field(
        192, ge=1, le=4096, json_schema_extra={"unit": "tokens"},
        description="prompt tokens that one step computes, at most; on a GPU max_step_rows unless set",
    )  # fmt: skip
    target_tpot_ms: float = Field(
        80.0, gt=0, description="time between tokens while prompts are computed, for requests that set none",
        json_schema_extra={"unit": "ms"},
    )  # fmt: skip

    speculation: SpeculationConfig = SpeculationConfig()

    @field_validator("max_context", "kv_tokens")
    @classmethod
    def _holds_something(cls, tokens: int, info: ValidationInfo) -> int:
        least = LEAST_KV_TOKENS if info.field_name == "kv_tokens" else 2  # a token of a prompt and one of the output
        if 0 < tokens < least:
            raise ValueError(f"must be 0 or at least {least}")
        return tokens

    @model_validator(mode="after")
    def _complete(self) -> EngineConfig:
        # The one place where validated values are completed; the configuration is frozen from here on.
        if "prefill_chunk" not in self.model_fields_set:
            object.__setattr__(self, "prefill_chunk", min(self.prefill_chunk, self.max_step_rows))
        elif "max_step_rows" not in self.model_fields_set:
            object.__setattr__(self, "max_step_rows", max(self.prefill_chunk, self.max_step_rows))
        needs = {"index": "indexes", "model": "draft", "head": "draft_head"}
        able = tuple(name for name, field in needs.items() if getattr(self, field) not in (None, {}))
        if self.speculation.drafters is None:
            chosen = ("grammar", "prediction", "suffix", *able)
            object.__setattr__(self, "speculation", self.speculation.model_copy(update={"drafters": chosen}))
        if self.prefill_chunk > self.max_step_rows:
            raise ValueError("prefill_chunk must not exceed max_step_rows")
        if self.max_batch > self.max_step_rows:
            raise ValueError("max_batch must not exceed max_step_rows: every sequence needs one row")
        for name in self.drafters:
            if name in needs and name not in able:
                raise ValueError(f"speculation.drafters names `{name}`, but {needs[name]} gives none")
        return self

    @property
    def default_draft_dtype(self) -> WeightDtype:
        """The default type of a draft model's weights on a CPU."""
        return "int3" if self.dtype in ("auto", "int8") else self.dtype

    @property
    def drafters(self) -> tuple[str, ...]:
        """The drafters to load, in order."""
        return self.speculation.drafters or ()


class ExperimentsConfig(Section):
    """Experiments that ran when the server ended go on when it starts again, even if ``start`` does not name them."""

    folder: UserPath | None = Field(None, description="folder for plans and records; null: no experiments")
    start: tuple[UserPath, ...] = Field((), description="YAML files of experiments to start once the model is loaded")

    @model_validator(mode="after")
    def _has_a_place(self) -> ExperimentsConfig:
        if self.start and self.folder is None:
            raise ValueError("start needs folder, in which the records are kept")
        return self


_ENDPOINT = re.compile(r"ipc://.+|tcp://(?P<host>\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")


class KvEventsConfig(Section):
    """Events of the prefix cache for routers, as vLLM publishes them. Needs the `kv-events` extra.

    Of several models the second publishes at the next port, and so on; an ipc path gets `.1`.
    """

    endpoint: str | None = Field(
        None, description="ZeroMQ address to publish at, such as tcp://127.0.0.1:5557; null: none"
    )
    replay_endpoint: str | None = Field(None, description="address that sends past messages again; null: none")
    topic: str = Field("", max_length=256, description="first part of each message; llm-d: kv@POD@MODEL")
    format: Literal["map", "positional"] = Field(
        "map", description="events with named fields, or as vLLM had them before 0.24"
    )
    connect: bool = Field(False, description="connect to a router that listens at endpoint, instead of listening there")
    salted: bool = Field(
        False, description="publish prompts under a cache salt too; with keys every prompt has one, by tenant"
    )
    off_loopback: bool = Field(
        False, description="other machines may be reached: events have the tokens of prompts, and ask for no key"
    )

    @model_validator(mode="after")
    def _addresses_are_sound(self) -> KvEventsConfig:
        if self.replay_endpoint is not None and self.endpoint is None:
            raise ValueError("replay_endpoint needs endpoint: what is not published is not sent again")
        # ZeroMQ would let one socket take over the other's ipc path without an error
        if self.endpoint is not None and self.replay_endpoint == self.endpoint:
            raise ValueError("replay_endpoint must be another address than endpoint")
        for name in ("endpoint", "replay_endpoint"):
            address = getattr(self, name)
            if address is None:
                continue
            found = _ENDPOINT.fullmatch(address)
            if found is None or not 0 < int(found["port"] or 1) <= 65535:
                raise ValueError(f"{name}: {address!r} must be tcp://HOST:PORT or ipc://PATH")
            if found["host"] is not None and not self.off_loopback and not _is_loopback(found["host"].strip("[]")):
                raise ValueError(
                    f"{name}: events carry the tokens of prompts and ask for no key, and {address} is not on loopback; "
                    "use tcp://127.0.0.1:PORT or ipc://PATH, or set off_loopback where the network is private"
                )
        return self

    def of_model(self, place: int) -> KvEventsConfig:
        """Where the model number ``place`` of a server publishes."""
        moved = {name: _moved(getattr(self, name), place) for name in ("endpoint", "replay_endpoint")}
        return self.model_copy(update=moved)


def _moved(endpoint: str | None, place: int) -> str | None:
    if endpoint is None or not place:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.{place}"
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + place}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> None:
    """Raises ValueError if ``tls_cert``, ``tls_key`` and ``tls_client_ca`` of a section do not belong together."""
    if (cert is None) != (key is None):
        given, missing = ("tls_cert", "tls_key") if key is None else ("tls_key", "tls_cert")
        raise ValueError(f"{given} needs {missing}: give both, or neither")
    if client_ca is not None and cert is None:
        raise ValueError("tls_client_ca needs tls_cert and tls_key: clients are known by certificate only over TLS")


_HOST = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
# What browsers write into an Origin header: scheme, host, and a port that is not the usual one; no path.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")


class ServerConfig(Section):
    """Where and how people connect. A port of 0 lets the system choose; None leaves that face closed.

    ``keys_file``, ``tls_cert``, ``tls_key`` and ``tls_client_ca`` are read again when they change.
    """

    host: str = Field("127.0.0.1", description="address or name to listen on; 0.0.0.0: all")
    grpc_port: int = Field(8400, ge=0, le=65535, description="gRPC port; 0: any free one")
    http_port: int | None = Field(8401, ge=0, le=65535, description="HTTP port; 0: any free one; null: no HTTP")
    page: bool = Field(True, description="serve the playground at /")
    cors_origins: tuple[str, ...] = Field(
        (), description="origins of pages that browsers may call HTTP from, such as https://a.example:8080; `*`: any"
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="host names that HTTP calls may come by, besides addresses and names of a local network; "
        "`*.a.example`: below that; `*`: any. Empty: those alone on loopback without keys, else any",
    )
    hold_headers: bool = Field(
        False,
        description="headers of streams wait for the first token, so that a router may repeat what fails before that; "
        "for one call: the header x-specdec-hold-headers: 1",
    )
    strict_fields: bool = Field(
        False, description="refuse HTTP bodies with unknown fields; false: ignore them, with a warning if misspelt"
    )
    drain_s: float = Field(30.0, ge=0, description="how long a stop waits for running requests")

    keys_file: UserPath | None = Field(None, description="YAML file of key hashes; null: no key is required")
    keys_without_tls: bool = Field(
        False, description="accept keys without TLS off loopback, behind a proxy that terminates TLS"
    )
    tls_cert: UserPath | None = Field(None, description="PEM certificate chain; with tls_key: serve TLS only")
    tls_key: UserPath | None = Field(None, description="PEM private key of tls_cert")
    tls_client_ca: UserPath | None = Field(
        None, description="PEM authorities; clients must present a certificate that one of them signed"
    )

    metrics_compat: Literal["none", "vllm"] = Field("none", description="vllm: /metrics has vLLM's names too")
    open_metrics: bool = Field(False, description="/metrics needs no key")
    log_format: Literal["auto", "json", "text"] = Field("auto", description="auto: text on a terminal, else JSON lines")
    log_calls: bool = Field(True, description="log one line per call: key, request, duration, tokens")
    log_texts: bool = Field(False, description="log prompts and outputs, which may be confidential")
    otlp_endpoint: str | None = Field(None, description="OTLP/gRPC collector for traces; needs the `otel` extra")

    max_queued_tokens: int = Field(1 << 18, ge=0, description="prompt tokens that may wait for the engine; 0: no limit")

    capture_dir: UserPath | None = Field(
        None, description="folder for requests that `specdec replay` sends again; null: nothing is kept"
    )
    capture_prompts: bool = Field(False, description="capture prompts too, not only their lengths and hashes")

    experiments: ExperimentsConfig = ExperimentsConfig()
    kv_events: KvEventsConfig = KvEventsConfig()

    @model_validator(mode="after")
    def _is_sound(self) -> ServerConfig:
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"cors_origins: {origin!r} is no origin; write it as browsers do, in lower case without a path: "
                    "https://a.example, http://localhost:3000, or * for any"
                )
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(
                    f"allowed_hosts: {host!r} is no host name; write it in lower case without scheme and port: "
                    "a.example, *.a.example, or * for any; addresses need no entry"
                )
        check_tls(self.tls_cert, self.tls_key, self.tls_client_ca)
        if self.keys_file is not None and self.tls_cert is None and not (self.keys_without_tls or self.on_loopback):
            raise ValueError(
                f"keys_file: keys would cross the network in the clear at host {self.host!r}; give tls_cert and "
                "tls_key, or set host to 127.0.0.1, or set keys_without_tls behind a proxy that terminates TLS"
            )
        if self.keys_file is not None and self.kv_events.endpoint is not None and not self.kv_events.salted:
            raise ValueError(
                "kv_events.salted: with keys_file every tenant's prompts are kept under a salt of its own, and events "
                "leave those out; set it to true if subscribers may see all tenants' prompts"
            )
        return self

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return _is_loopback(self.host)


class Config(Section):
    """The whole configuration, as a YAML file holds it: ``engine:`` and ``server:``.

    ``engines``: several models of one server by name, each with an engine of its own. They take the fields that they do
    not set from ``engine:`` (its aliases only the first). After the check, ``engine`` is the first of them.
    """

    engine: EngineConfig = EngineConfig()
    engines: dict[Name, EngineConfig] = {}
    server: ServerConfig = ServerConfig()

    @model_validator(mode="before")
    @classmethod
    def _complete_engines(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not isinstance(data.get("engines"), Mapping) or not data["engines"]:
            return data
        shared = data.get("engine") or {}
        if not isinstance(shared, Mapping):
            return data
        left = {name: value for name, value in data.items() if name != "engine"}
        found: dict[Any, Any] = {}
        for name, own in data["engines"].items():
            found[name] = merged(shared, own or {}) if isinstance(own or {}, Mapping) else own
            shared = {field: value for field, value in shared.items() if field != "aliases"}
        return left | {"engines": found}

    @model_validator(mode="after")
    def _engines_stand_apart(self) -> Config:
        if not self.engines:
            return self
        # Completed here, as the drafters are; the configuration is frozen from now on.
        object.__setattr__(self, "engine", next(iter(self.engines.values())))
        names: dict[str, str] = {}
        files: dict[Path, str] = {}
        for name in self.engines:
            names.setdefault(name.lower(), name)
        for name, engine in self.engines.items():
            for known in (name, *engine.aliases):
                owner = names.setdefault(known.lower(), name)
                if owner != name:
                    raise ValueError(f"engines.{name}.aliases: {known!r} is a name of engines.{owner} too")
            file = engine.speculation.trace_file
            if file is not None and (owner := files.setdefault(file, name)) != name:
                raise ValueError(f"engines.{name}.speculation.trace_file: engines.{owner} writes {file} too")
        owners: dict[str, str] = {}
        for place, name in enumerate(self.engines):
            events = self.server.kv_events.of_model(place)
            for address in (None if events.connect else events.endpoint, events.replay_endpoint):
                if address is not None and (owner := owners.setdefault(address, name)) != name:
                    raise ValueError(
                        f"server.kv_events.replay_endpoint: each model has the next port, so {address} would be of "
                        f"engines.{owner} and of engines.{name}; take one {len(self.engines)} or more above endpoint's"
                    )
        return self


def merged(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """``own`` with the fields that only ``shared`` has, also inside of mappings. Null counts as an empty mapping."""
    found = dict(shared) | dict(own)
    for name, value in shared.items():
        inner = {} if own.get(name) is None else own[name]
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            found[name] = merged(value, inner)
    return found


def load_config(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Merge a YAML file with dotted overrides (``{"engine.target": "x"}``; None values are skipped).

    Overrides of ``engine`` apply to each of the file's ``engines``, ``engine.aliases`` to the first.

    Raises:
        ConfigError: the file cannot be read, or a field is unknown or out of range; names every such field.
    """
    data = read_mapping(path, "`engine:` and `server:`") if path else {}
    named = data.get("engines")
    engines = [("engines", name) for name in named] if isinstance(named, dict) else []
    for dotted, value in (overrides or {}).items():
        if value is None:
            continue
        section, *names = dotted.split(".")
        places = engines if engines and section == "engine" else [(section,)]
        for place in places[:1] if names == ["aliases"] else places:
            _put(data, (*place, *names), value, path)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path or 'configuration'}: {problems(error, Config)}") from None


def _put(data: dict[str, Any], names: Sequence[str], value: Any, path: Path | None) -> None:
    node = data
    for depth, name in enumerate(names[:-1], 1):
        node[name] = node.get(name) or {}  # it may be null, as a section with nothing under it
        node = node[name]
        if not isinstance(node, dict):
            raise ConfigError(f"{path}: `{'.'.join(map(str, names[:depth]))}` must hold a mapping")
    node[names[-1]] = value


def problems(error: ValidationError, model: Any) -> str:
    """Every invalid field with the reason, joined by semicolons; only a reason where no single field is at fault.

    model: what was validated, a model or a type that contains models.
    """
    found = ((".".join(map(str, e["loc"])), reason_of(e, model)) for e in error.errors())
    return "; ".join(f"{field}: {reason}" if field else reason for field, reason in found)


def reason_of(problem: ErrorDetails, model: Any) -> str:
    """What is wrong with a field; of one that does not exist, also which one may be meant."""
    if problem["msg"].startswith("Input should be a valid dictionary"):  # goes on with a class of Python
        return "must hold a mapping of fields"
    if problem["type"] != "extra_forbidden":
        text = problem["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
        return text.removesuffix(" for <class 'pathlib.Path'>")
    *path, name = map(str, problem["loc"])
    sections = _models_in(model)
    for part in path:  # one that is no field is a key of a mapping or an index of a list, whose values are the sections
        kinds = [section.model_fields[part].annotation for section in sections if part in section.model_fields]
        sections = [inner for kind in kinds for inner in _models_in(kind)] or sections
    fields = [field for section in sections for field in section.model_fields]
    likely = _place_of(model, name) or "".join(difflib.get_close_matches(name, fields, 1, 0.75))
    return "there is no such field" + (f", did you mean `{likely}`?" if likely else "")


def _models_in(kind: Any) -> list[type[BaseModel]]:
    """The models of which a value of type ``kind`` consists."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [model for inner in get_args(kind) for model in _models_in(inner)]


def _place_of(kind: Any, name: str) -> str:
    """The field's dotted path in the models of ``kind``; empty if they have none of that name."""
    for model in _models_in(kind):
        if name in model.model_fields:
            return name
        for section, field in model.model_fields.items():
            kind = field.annotation  # a key or an index stands before the fields inside a mapping or a list
            if get_origin(kind) not in (dict, list, tuple) and (inner := _place_of(kind, name)):
                return f"{section}.{inner}"
    return ""


def load_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        YAMLError: the text is not valid, or a mapping has a key twice, which is named with its line.
    """
    try:
        return yaml.load(text, _UniqueKeys)
    except (ValueError, RecursionError) as error:  # a date that does not exist, and unbounded nesting
        raise yaml.YAMLError(str(error)) from None


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which YAML libraries silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of ``node``; YAMLError with the key's name and line if it has one twice."""
        keys: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key.__hash__ is not None and key in keys:
                raise yaml.YAMLError(f"line {key_node.start_mark.line + 1}: the key `{key}` is given twice")
            keys.update([key] if key.__hash__ is not None else [])
        return super().construct_mapping(node, deep)


def read_text(path: Path, name: str) -> str:
    """The text of a file. name: of the file, with which an error begins.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else "is not UTF-8 text"
        raise ConfigError(f"{name} {reason}") from None


def read_key(path: Path, field: str) -> str:
    """The key in the file that the field or option ``field`` names.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    key = read_text(path, f"{field}: {path}").strip()
    if len(key.split()) != 1 or not key.isascii():
        raise ConfigError(f"{field}: {path} must hold one key and nothing else")
    return key


def read_mapping(path: Path, of: str) -> dict[str, Any]:
    """The mapping in a YAML file; empty for an empty file. of: its keys, for the error's text.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        data = load_yaml(read_text(path, f"{path}:"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold a mapping with {of}")
    return data
