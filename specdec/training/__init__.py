"""Training of feature heads and draft models on texts that the target writes itself."""
