"""The language server: inline completion for editors that support LSP 3.18, from a specdec server."""
