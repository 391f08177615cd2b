"""What a handler may want to know beside its resume."""

from __future__ import annotations

from typing import Any, Final

from notify_consumer.resume import Resume
from timer_service.clock import Clock, SystemClock
from timer_service.logs import get_logger

_CLOCK: Final = SystemClock()


class Deadline:
    """When a hand-off is cut off, in epoch milliseconds; None while nothing will. It only comes nearer."""

    def __init__(self, clock: Clock = _CLOCK) -> None:
        self._clock = clock
        self.at_ms: int | None = None
        self.stopping = False

    def within(self, ms: int) -> None:
        """The hand-off has ``ms`` from now at most."""
        at_ms = self._clock.now_ms() + ms
        self.at_ms = at_ms if self.at_ms is None else min(self.at_ms, at_ms)

    def stop(self, grace_ms: int) -> None:
        """The process is stopping: what runs has this long to end."""
        self.stopping = True
        self.within(grace_ms)

    def remaining_ms(self) -> int | None:
        """How long there is still, 0 when it is over."""
        return None if self.at_ms is None else max(self.at_ms - self._clock.now_ms(), 0)


class Context:
    """One hand-off. A handler gets it in a parameter annotated with this class; any thread may read it.

    ``attempt`` counts the hand-offs of this resume from 1, those that were lost with a process included.
    ``logger`` adds resume_id, flow, node (where there is one) and attempt to every event.
    """

    def __init__(self, resume: Resume, *, flow: str, attempt: int, deadline: Deadline | None = None) -> None:
        self.resume = resume
        self.attempt = attempt
        node = {"node": resume.timer["node_id"]} if "node_id" in resume.timer else {}
        self.logger: Any = get_logger(resume_id=resume.resume_id, flow=flow, **node, attempt=attempt)
        self.deadline = deadline or Deadline()

    @property
    def deadline_ms(self) -> int | None:
        """When this hand-off is cut off, in epoch milliseconds by this machine's clock.

        None at first for a handler without a time-out: its lease is renewed for as long as it runs. When the
        process begins to stop, the end of the grace counts if that is sooner.
        """
        return self.deadline.at_ms

    @property
    def remaining_ms(self) -> int | None:
        """How long it is until then; 0 when it is over, None without a deadline."""
        return self.deadline.remaining_ms()

    @property
    def stopping(self) -> bool:
        """Whether the process is stopping: the time for a plain function, which can't be cancelled, to end early."""
        return self.deadline.stopping
