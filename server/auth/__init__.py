"""Authentication: bearer keys from a file of hashes, tenants, TLS."""
