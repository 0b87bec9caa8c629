"""gRPC: thin servicers over the engine client."""
