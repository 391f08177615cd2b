"""What the notify consumer raises on purpose, below the project's one root.

DurableTimerError
└── NotifyConsumerError
    ├── OutboxError
    │   ├── OutboxUnavailable   the store does not answer, is locked or unreadable: try again later
    │   └── LeaseLost           the claim is no longer this owner's: nothing was written
    ├── UnreadableResume        a message that is no resume; ``resume_id`` when it names one
    ├── HandlerFailed           a handler raised, took too long, or answered with what is no answer
    ├── HandoffRefused          a hand-off that no repetition would make good
    └── BadSetting              a setting that can't be used, for the person who gave it
"""

from __future__ import annotations

from timer_service.errors import DurableTimerError


class NotifyConsumerError(DurableTimerError):
    """The root of what this package raises."""


class OutboxError(NotifyConsumerError):
    """Something about the outbox."""


class OutboxUnavailable(OutboxError):
    """The store did not carry it out, or did not say so. Every operation may be repeated."""


class LeaseLost(OutboxError):
    """Another owner has the row, or it is settled: nothing was written, and this claim is worth nothing."""

    def __init__(self, resume_id: str) -> None:
        super().__init__(f"the claim of {resume_id} was lost")
        self.resume_id = resume_id


class UnreadableResume(NotifyConsumerError):
    """Bytes that are no resume. ``resume_id`` is None where not even that can be read."""

    def __init__(self, message: str, resume_id: str | None) -> None:
        super().__init__(message)
        self.resume_id = resume_id


class HandlerFailed(NotifyConsumerError):
    """A hand-off without an answer; the text is kept in the row."""


class HandoffRefused(NotifyConsumerError):
    """The payload fits no handler as it is: the row goes to the dead state, with the text as the reason."""


class BadSetting(NotifyConsumerError):
    """A setting that can't be used; the text is for the person who gave it."""
