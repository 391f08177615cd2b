"""Which timers may have an archive record: asked at every start, answered without the broker.

A Bloom filter over the timer_refs, which are hashes already. It is filled by a scan of the archive's subjects in
the background, by our own ends, and by the removal markers that the feed shows. Until the scan has finished, and
for a ref that the filter takes for known, a start looks into the archive itself.

Markers run out: who has not followed the state for that long (frozen, cut off from the broker) may have missed some
for good. So a "no" counts only while the last proof of having followed is younger than half a marker's age, and after a
longer gap the archive is scanned again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from timer_service.domain.identity import TimerRef

_INDEX_BITS = 27
_SIZE_BYTES = 2**_INDEX_BITS // 8  # 16 MiB: 1 of 100 unknown refs is looked up in vain at 13 million records
_PROBES = 4
_MASK = 2**_INDEX_BITS - 1
_DIGITS = str.maketrans("abcdefghijklmnopqrstuvwxyz234567", "0123456789abcdefghijklmnopqrstuv")


_LEAST_TRUST_MS = 10_000
"""Proofs come every other second: with markers shorter than twice this, every start looks into the archive."""


class Archived:
    """May say yes wrongly, never no, once ``complete``. ``markers_ms`` is how long a removal marker stands."""

    def __init__(self, now_ms: Callable[[], int] = lambda: 0, markers_ms: int = 3_600_000) -> None:
        self._bits = bytearray(_SIZE_BYTES)
        self._now_ms = now_ms
        self._trust_ms = markers_ms // 2
        self._followed_ms = now_ms()
        self.complete = False
        self.doubted = asyncio.Event()
        """Set when markers may have been missed: the archive is to be scanned again."""

    def followed(self, until_ms: int) -> None:
        """Every removal up to this instant has been seen, or its marker has run out unseen."""
        if until_ms - self._followed_ms > self._trust_ms >= _LEAST_TRUST_MS:
            self.complete = False
            self.doubted.set()
        self._followed_ms = max(self._followed_ms, until_ms)

    def add(self, timer_ref: TimerRef) -> None:
        """Remember ``timer_ref``; adding it again does nothing."""
        value = int(timer_ref.translate(_DIGITS), 32)
        for _ in range(_PROBES):
            index = value & _MASK
            self._bits[index >> 3] |= 1 << (index & 7)
            value >>= _INDEX_BITS

    def may_have(self, timer_ref: TimerRef) -> bool:
        """False only when there is surely no record."""
        if not self.complete or self._trust_ms < _LEAST_TRUST_MS or self._stale():
            return True
        value = int(timer_ref.translate(_DIGITS), 32)
        for _ in range(_PROBES):
            index = value & _MASK
            if not self._bits[index >> 3] & 1 << (index & 7):
                return False
            value >>= _INDEX_BITS
        return True

    def _stale(self) -> bool:
        return self._now_ms() - self._followed_ms > self._trust_ms
