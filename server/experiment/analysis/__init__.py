"""From records to a verdict."""
