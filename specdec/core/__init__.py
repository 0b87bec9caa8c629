"""What a request is and what is kept of it: types with their bounds, sequences, trees, sampling, KV pages, stops."""
