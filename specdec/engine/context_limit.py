"""How long a sequence may get."""

from __future__ import annotations

from specdec.config import EngineConfig
from specdec.errors import ConfigError
from specdec.models.model_config import ModelConfig
from verify_kernels.forward_batch import PAGE_SIZE

DEFAULT_CONTEXT = 8192


def context_limit(config: EngineConfig, model: ModelConfig) -> int:
    """Longest sequence served: what was asked for, within the model's own limit and the whole KV cache.

    Raises:
        ConfigError: more context was asked for than the model has.
    """
    if config.max_context > model.max_context:
        raise ConfigError(f"engine.max_context: {config.max_context} exceeds the model's {model.max_context}")
    wanted = config.max_context or min(model.max_context, DEFAULT_CONTEXT)
    # One page stays free of context so that a lone sequence always has room for a tree.
    return max(1, min(wanted, -(-config.kv_tokens // PAGE_SIZE) * PAGE_SIZE - PAGE_SIZE))
