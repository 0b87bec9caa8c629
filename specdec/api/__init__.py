"""The public gRPC interface: one package per version."""
