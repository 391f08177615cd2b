"""The messages and stored records, version 1, and their mapping to domain values."""
