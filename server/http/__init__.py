"""The HTTP server: one engine behind several dialects of JSON over HTTP."""
