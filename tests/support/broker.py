"""A real nats-server that tests may break."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from timer_service.embedded import EmbeddedBroker

if TYPE_CHECKING:
    from collections.abc import Iterator


_FREEZE_S = 20.0


def _stands(stat: Path) -> bool:
    """Whether a thread is stopped, by its state letter behind the name in brackets."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in "Tt"
    except (FileNotFoundError, ProcessLookupError):
        return True  # the thread has ended meanwhile


class Broker(EmbeddedBroker):
    """The embedded broker, which can also be frozen.

    ``start`` after ``stop`` or ``kill`` comes back on the same port with the same store. Only the process
    that this object started is ever signalled.
    """

    def pause(self) -> None:
        """Freeze the server (SIGSTOP): connections stay open, nothing answers. Returns when every thread stands."""
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + _FREEZE_S
        while not all(_stands(stat) for stat in Path(f"/proc/{self.pid}/task").glob("*/stat")):
            if time.monotonic() > deadline:
                raise AssertionError(f"the server is not frozen within {_FREEZE_S} s")
            time.sleep(0.001)

    def resume(self) -> None:
        """Let a frozen server go on (SIGCONT)."""
        self._signal(signal.SIGCONT)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Frozen within the block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def restart(self, *, hard: bool = False) -> None:
        """Stop, or kill, and start again."""
        self.kill() if hard else self.stop()
        self.start()

    def stop(self) -> None:
        """Shut down cleanly, also when frozen: a stopped process does not see SIGTERM before it goes on."""
        if self.running:
            self.resume()
        super().stop()

    def _signal(self, number: signal.Signals) -> None:
        if (pid := self.pid) is None:
            raise RuntimeError("the broker does not run")
        os.kill(pid, number)
