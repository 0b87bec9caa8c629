"""The language server: inline completion for every editor that speaks LSP 3.18, from a specdec server."""
