"""The gRPC face: thin servicers over the engine client."""
