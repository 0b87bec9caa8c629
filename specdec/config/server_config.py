"""Server configuration, and the whole: what a config file holds."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specdec.config.engine_config import EngineConfig
from specdec.config.experiments_config import ExperimentsConfig

# What browsers write into an Origin header: scheme, host, and a port that is not the usual one; no path.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")


class ServerConfig(BaseModel):
    """Where and how people connect. A port of 0 lets the system choose; None leaves that face closed.

    ``keys_file``, ``tls_cert``, ``tls_key`` and ``tls_client_ca`` are read again when they change.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address or name to listen on; 0.0.0.0: all")
    grpc_port: int = Field(8400, ge=0, le=65535, description="0: any free one")
    http_port: int | None = Field(8401, ge=0, le=65535, description="0: any free one; null: no HTTP")
    reflection: bool = Field(True, description="gRPC clients may ask which services and messages there are")
    max_message_bytes: int = Field(16 << 20, ge=1 << 16, description="of one gRPC message or HTTP body, at most")
    page: bool = Field(True, description="serve the page that shows trees; false: / only says that a server runs")
    cors_origins: tuple[str, ...] = Field(
        (), description="origins of pages that browsers may call HTTP from, such as https://a.example:8080; `*`: any"
    )
    heartbeat_timeout_s: float = Field(30.0, gt=0, description="an engine silent for this long is restarted")
    drain_s: float = Field(30.0, ge=0, description="how long a stop waits for running requests")

    keys_file: Path | None = Field(None, description="YAML file of key hashes; null: whoever can connect may call")
    open_health: bool = Field(True, description="health and readiness need no key")
    open_reflection: bool = Field(False, description="gRPC reflection needs no key")
    keys_without_tls: bool = Field(False, description="take keys off loopback in the clear: a proxy in front has TLS")
    tls_cert: Path | None = Field(None, description="PEM certificate chain; with tls_key: serve TLS only")
    tls_key: Path | None = Field(None, description="PEM private key of tls_cert")
    tls_client_ca: Path | None = Field(None, description="PEM authorities; clients must show a certificate of theirs")

    metrics_compat: Literal["none", "vllm"] = Field("none", description="/metrics has vLLM's names too")
    open_metrics: bool = Field(False, description="/metrics needs no key")
    log_format: Literal["auto", "json", "text"] = Field("auto", description="auto: text on a terminal, else JSON lines")
    log_calls: bool = Field(True, description="one line per call: who, what, how long, how many tokens")
    log_texts: bool = Field(False, description="these lines hold prompts and outputs, which may be confidential")
    otlp_endpoint: str | None = Field(None, description="OTLP/gRPC collector for traces; needs the `otel` extra")
    trace_ratio: float = Field(
        1.0, ge=0, le=1, description="of the traces that begin here, those kept", json_schema_extra={"unit": "share"}
    )

    max_queued_tokens: int = Field(1 << 18, ge=0, description="prompt tokens that may wait for the engine; 0: no limit")
    shed_late: bool = Field(True, description="refuse at once what can not be done by its deadline")

    capture_dir: Path | None = Field(None, description="folder for what `specdec capture` reads; null: nothing is kept")
    capture_prompts: bool = Field(False, description="keep prompts there too, not only their lengths and hashes")
    capture_bytes: int = Field(256 << 20, ge=1 << 20, description="the oldest are dropped beyond this")

    experiments: ExperimentsConfig = ExperimentsConfig()

    @model_validator(mode="after")
    def _origins_are_origins(self) -> ServerConfig:
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"cors_origins: {origin!r} is no origin; write it as browsers do, in lower case without a path: "
                    "https://a.example, http://localhost:3000, or * for any"
                )
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> ServerConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise ValueError(f"{given} needs {missing}: give both, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key: clients are known by certificate only over TLS")
        return self

    @model_validator(mode="after")
    def _keys_stay_secret(self) -> ServerConfig:
        if self.keys_file is not None and self.tls_cert is None and not (self.keys_without_tls or self.on_loopback):
            raise ValueError(
                f"keys_file: keys would cross the network in the clear at host {self.host!r}; give tls_cert and "
                "tls_key, or set host to 127.0.0.1, or set keys_without_tls where a proxy in front speaks TLS"
            )
        return self

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class Config(BaseModel):
    """The whole configuration, as a YAML file holds it: ``engine:`` and ``server:``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
