"""What people connect to: gRPC, HTTP and editors in front of each model's queue and engine process."""
