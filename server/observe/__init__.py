"""What is known of calls and requests while they run: metrics, logs and traces are made from it."""
