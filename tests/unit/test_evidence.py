"""Evidence that the broker's state is not the one that was learnt: noticed, and kept until a scan has acted on it."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest

from timer_service.clock import SystemClock
from timer_service.errors import Unavailable
from timer_service.metrics import Metrics
from timer_service.ports import StreamState
from timer_service.runtime import reconciler as module
from timer_service.runtime.reconciler import Reconciler
from timer_service.runtime.tally import Tally


@pytest.mark.parametrize(
    ("acks", "back"),
    [([1, 2, 3], False), ([1, 5, 6], False), ([5, 6, 4], True), ([5, 5], True), ([], False)],
)
def test_sequences_that_come_again_are_noticed(acks: list[int], back: bool) -> None:
    """Our own acks only ever go up: one that does not is from another stream, whatever was written meanwhile."""
    tally = Tally()
    for seq in acks:
        tally.wrote(seq)
    assert tally.went_back is back
    tally.reset()
    assert tally.went_back is False


def test_reading_ahead_of_an_ack_is_no_evidence() -> None:
    """The feed may be faster than the ack of the same write."""
    tally = Tally()
    tally.read(7)
    tally.wrote(7)
    tally.read(9)
    tally.wrote(8)
    assert tally.went_back is False


class _Log:
    def warning(self, *_: Any, **__: Any) -> None: ...
    def info(self, *_: Any, **__: Any) -> None: ...


class _Feed:
    """A feed whose rescans fail so many times."""

    def __init__(self, failures: int) -> None:
        self.ready = asyncio.Event()
        self.ready.set()
        self.position, self.went_back = 5, False
        self.scans: list[bool] = []
        self._failures = failures

    async def look(self, _: int) -> None: ...

    async def rescan(self, *, distrust: bool) -> int:
        self.scans.append(distrust)
        if len(self.scans) <= self._failures:
            raise Unavailable("away again")
        self.position, self.went_back = 0, False
        return 0


async def run(feed: _Feed, states: list[StreamState], looks: int) -> None:
    """Let a reconciler look so many times, the last state again and again."""
    done = asyncio.Event()
    looked = 0

    async def look() -> StreamState:
        nonlocal looked
        looked += 1
        if looked > looks:
            done.set()
        return states[min(looked, len(states)) - 1]

    async def sweep(*_: Any) -> int:
        return 0

    class Driver(SimpleNamespace):
        def __len__(self) -> int:
            return 0

    reconciler = Reconciler(
        SystemClock(),
        cast(Any, feed),
        cast(Any, Driver(armed=list)),
        cast(Any, None),
        cast(Any, None),
        cast(Any, SimpleNamespace(known=set)),
        cast(Any, SimpleNamespace(sweep=sweep)),
        look,
        Metrics(),
        _Log(),
        interval_ms=3_600_000,
        snapshot_grace_ms=1_000,
    )
    running = asyncio.create_task(reconciler.run())
    async with asyncio.timeout(20):
        await done.wait()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("failures", [0, 1, 3])
async def test_evidence_is_kept_until_a_scan_has_acted_on_it(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    """A scan that fails (the broker is away again) is owed, also when the evidence itself can't be seen any more."""
    monkeypatch.setattr(module, "EVIDENCE_INTERVAL_S", 0.001)
    feed = _Feed(failures)
    await run(feed, [StreamState("monday", 5, 0), StreamState("tuesday", 5, 0)], 10)
    assert feed.scans == [True] * (failures + 1)


@pytest.mark.parametrize(("last_seq", "went_back"), [(4, False), (9, True), (9, False)])
async def test_a_stream_that_went_back_is_read_again(
    monkeypatch: pytest.MonkeyPatch, last_seq: int, went_back: bool
) -> None:
    """Its last sequence below ours, or, when new writes have passed that, sequences that came again: one scan."""
    monkeypatch.setattr(module, "EVIDENCE_INTERVAL_S", 0.001)
    feed = _Feed(0)
    feed.went_back = went_back
    await run(feed, [StreamState("monday", last_seq, 0)], 5)
    assert feed.scans == ([True] if last_seq < 5 or went_back else [])


async def test_without_evidence_nothing_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look costs one question, not a scan."""
    monkeypatch.setattr(module, "EVIDENCE_INTERVAL_S", 0.001)
    feed = _Feed(0)
    await run(feed, [StreamState("monday", 5, 0)], 10)
    assert feed.scans == []
