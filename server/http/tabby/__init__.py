"""Tabby's dialect: /v1/completions with segments, /v1/health, /v1beta/server_setting, /v1/events."""
