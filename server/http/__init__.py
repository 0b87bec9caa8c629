"""The HTTP face: one engine behind several dialects of JSON over HTTP."""
