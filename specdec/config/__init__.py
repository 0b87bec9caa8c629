"""The one validated configuration: `EngineConfig` for the engine, `ServerConfig` for what people connect to."""

from specdec.config.engine_config import DeviceDtype, Dtype, EngineConfig, SpeculationConfig, WeightDtype
from specdec.config.experiments_config import ExperimentsConfig
from specdec.config.load import load_config
from specdec.config.server_config import Config, ServerConfig

__all__ = [
    "Config",
    "DeviceDtype",
    "Dtype",
    "EngineConfig",
    "ExperimentsConfig",
    "ServerConfig",
    "SpeculationConfig",
    "WeightDtype",
    "load_config",
]
