"""What requests came when, written down to be asked again: lengths and hashes, prompts only when asked for."""
