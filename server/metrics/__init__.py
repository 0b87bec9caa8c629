"""Prometheus metrics: counted from the engine's events, exported under specdec's names and, if asked for, vLLM's."""
