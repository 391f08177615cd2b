"""A broker for one measurement: a fresh store in a folder of its own, gone afterwards."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from timer_service.embedded import EmbeddedBroker


@dataclass(frozen=True, slots=True)
class Broker:
    """Where a running broker answers, and its process for measuring."""

    url: str
    pid: int


@contextmanager
def running_broker() -> Iterator[Broker]:
    """The embedded broker that the demo runs on. Raises EmbeddedServerError if it does not come up."""
    with (
        tempfile.TemporaryDirectory(prefix="durable-timer-bench-") as folder,
        EmbeddedBroker(folder) as broker,
    ):
        assert broker.pid is not None
        yield Broker(broker.url, broker.pid)
