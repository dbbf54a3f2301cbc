"""The parity certificate: a tiny run under the user's config, compared with one process."""
