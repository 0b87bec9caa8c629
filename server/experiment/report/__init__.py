"""A result as one HTML page without scripts or external resources."""
