"""Training of feature heads on texts that the target writes itself."""
