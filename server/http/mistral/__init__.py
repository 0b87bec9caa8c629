"""Mistral's dialect: /v1/fim/completions."""
