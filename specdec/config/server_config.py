"""Server configuration, and the whole: what a config file holds."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from specdec.config.engine_config import EngineConfig


class ServerConfig(BaseModel):
    """Where and how people connect. A port of 0 lets the system choose; None leaves that face closed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    grpc_port: int = Field(8400, ge=0, le=65535)
    http_port: int | None = Field(8401, ge=0, le=65535)
    reflection: bool = True
    max_message_bytes: int = Field(16 << 20, ge=1 << 16)
    heartbeat_timeout_s: float = Field(30.0, gt=0, description="an engine silent for this long is restarted")
    drain_s: float = Field(30.0, ge=0, description="how long a stop waits for running requests")


class Config(BaseModel):
    """The whole configuration, as a YAML file holds it: ``engine:`` and ``server:``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
