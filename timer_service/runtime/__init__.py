"""The moving parts, each with one job."""
