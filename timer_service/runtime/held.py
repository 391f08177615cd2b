"""Commands that were given back for want of room: whose they are, when they come again, and how to have them sooner."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

from timer_service.domain.identity import TimerRef
from timer_service.runtime.settling import Delivery

HOLD_MS = 2_000
"""How long a command at least waits that was given back for want of room."""
_MAX_HOLD_MS = 600_000
_BACK_A_SECOND = 500
"""So many come back by themselves: many more would keep what could go on from being read at all."""
_REMEMBERED = 50_000


class Held:
    """What waits for room. Noting and asking cost the same always.

    A timer is remembered for longer than its command stays away, and at most four times as long. Of so many commands,
    the oldest first, the delivery is remembered too (without its body), so that they can be asked back at once.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._young: dict[TimerRef, int] = {}
        self._old: dict[TimerRef, int] = {}
        self._turned_at = 0.0
        self._starts: dict[int, Delivery] = {}
        self._others: dict[int, Delivery] = {}

    def __len__(self) -> int:
        """About how many timers have one."""
        return max(len(self._young), len(self._old))

    def note(self, timer_ref: TimerRef, delivery: Delivery, *, start: bool) -> int:
        """``delivery`` is about to be given back; returns for how many milliseconds."""
        self._turn()
        self._young[timer_ref] = min(delivery.seq, self._seq_of(timer_ref, delivery.seq))
        kept = self._starts if start else self._others
        if len(kept) < _REMEMBERED:
            kept[delivery.seq] = remembered = copy(delivery)
            remembered.data, remembered.headers = b"", None
        return self._hold_ms()

    def __contains__(self, timer_ref: TimerRef) -> bool:
        self._turn()
        return timer_ref in self._young or timer_ref in self._old

    def older(self, timer_ref: TimerRef, seq: int) -> bool:
        """Whether a command of this timer waits that was stored before ``seq``."""
        self._turn()
        return self._seq_of(timer_ref, seq) < seq

    def arrived(self, seq: int) -> None:
        """It is here again."""
        if self._starts or self._others:
            self._starts.pop(seq, None)
            self._others.pop(seq, None)

    def settled(self, timer_ref: TimerRef, seq: int) -> None:
        """This one waits no more."""
        for known in (self._young, self._old):
            if known and known.get(timer_ref) == seq:
                del known[timer_ref]

    def take(self, most: int, *, starts: bool) -> list[Delivery]:
        """Up to ``most`` deliveries in stored order, to be asked back; they are remembered no longer."""
        kept = self._starts if starts else self._others
        return [kept.pop(seq) for seq in sorted(kept)[:most]]

    def _seq_of(self, timer_ref: TimerRef, default: int) -> int:
        return min(self._young.get(timer_ref, default), self._old.get(timer_ref, default))

    def _hold_ms(self) -> int:
        return min(max(HOLD_MS, 1000 * len(self) // _BACK_A_SECOND), _MAX_HOLD_MS)

    def _turn(self) -> None:
        keep_s, age_s = 2 * self._hold_ms() / 1000, self._now_s() - self._turned_at
        if age_s >= keep_s:
            self._old = self._young if age_s < 2 * keep_s else {}
            self._young = {}
            self._turned_at = self._now_s()
