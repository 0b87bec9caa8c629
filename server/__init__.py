"""What people connect to: the engine's process and its client, gRPC, probes."""
