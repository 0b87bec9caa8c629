"""A result as one HTML page: no network, no script."""
