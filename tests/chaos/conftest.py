"""The stage for tests with real processes."""

from tests.support.stage import desk, service, stage

__all__ = ["desk", "service", "stage"]
