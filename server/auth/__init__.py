"""Who calls, and over what: bearer keys from a file of hashes, tenants, TLS."""
