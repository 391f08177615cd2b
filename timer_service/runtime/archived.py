"""Which timers may have an archive record: asked at every start, answered without the broker.

A Bloom filter over the timer_refs, which are hashes already. It is filled by a scan of the archive's subjects in
the background, by our own ends, and by the removal markers that the feed shows. Until the scan has finished, and
for a ref that the filter takes for known, a start looks into the archive itself.
"""

from __future__ import annotations

from timer_service.domain.identity import TimerRef

_INDEX_BITS = 27
_SIZE_BYTES = 2**_INDEX_BITS // 8  # 16 MiB: 1 of 100 unknown refs is looked up in vain at 13 million records
_PROBES = 4
_MASK = 2**_INDEX_BITS - 1
_DIGITS = str.maketrans("abcdefghijklmnopqrstuvwxyz234567", "0123456789abcdefghijklmnopqrstuv")


class Archived:
    """May say yes wrongly, never no, once ``complete``."""

    def __init__(self) -> None:
        self._bits = bytearray(_SIZE_BYTES)
        self.complete = False

    def add(self, timer_ref: TimerRef) -> None:
        """Remember ``timer_ref``; adding it again does nothing."""
        value = int(timer_ref.translate(_DIGITS), 32)
        for _ in range(_PROBES):
            index = value & _MASK
            self._bits[index >> 3] |= 1 << (index & 7)
            value >>= _INDEX_BITS

    def may_have(self, timer_ref: TimerRef) -> bool:
        """False only when there is surely no record."""
        if not self.complete:
            return True
        value = int(timer_ref.translate(_DIGITS), 32)
        for _ in range(_PROBES):
            index = value & _MASK
            if not self._bits[index >> 3] & 1 << (index & 7):
                return False
            value >>= _INDEX_BITS
        return True
