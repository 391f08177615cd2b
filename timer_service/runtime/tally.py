"""Which changes of the state stream are accounted for: read by the feed, or our own and known from their acks."""

from __future__ import annotations


class Tally:
    """Everything up to ``position`` is accounted for, without a gap."""

    def __init__(self) -> None:
        self.position = 0
        self._own: set[int] = set()
        self._unclaimed: set[int] = set()
        self._newest_own = 0
        self.went_back = False
        """The stream has given out a sequence again: acks come in its order, so it is not the one that we knew."""

    def wrote(self, seq: int) -> None:
        """An ack says that ``seq`` is our own."""
        self.went_back = self.went_back or seq <= self._newest_own
        self._newest_own = seq
        self._unclaimed.discard(seq)
        if seq > self.position + 1:
            self._own.add(seq)
            return
        self.position = max(self.position, seq)
        self._advance()

    def read(self, seq: int) -> bool:
        """The feed has come to ``seq``, and so past all before it. True when it is known to be our own."""
        if seq <= self.position:
            return True
        own = seq in self._own
        if not own:
            self._unclaimed.add(seq)
        self.position = seq
        if self._own:
            self._own = {other for other in self._own if other > seq}
            self._advance()
        return own

    def take_unclaimed(self) -> set[int]:
        """What was read and not acknowledged to us so far: foreign, unless its ack is still on its way."""
        taken, self._unclaimed = self._unclaimed, set()
        return taken

    def reset(self) -> None:
        """The stream is another one."""
        self.__init__()  # type: ignore[misc]

    def _advance(self) -> None:
        while self.position + 1 in self._own:
            self.position += 1
            self._own.remove(self.position)
