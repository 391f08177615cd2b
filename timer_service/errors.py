"""The one error tree.

DurableTimerError
├── BrokerError              something between us and the broker
│   ├── Ambiguous            the reply is missing: the write may or may not have been stored
│   ├── Unavailable          nobody answers for this resource: it was not stored
│   ├── WrongRevision        compare-and-set lost; ``actual`` is the revision that stands, when told
│   ├── StorageFull          the broker refused for want of room; it was not stored
│   ├── Forbidden            the account may not do this
│   ├── NotFound             no such message, stream or consumer
│   └── RequestRefused       any other refusal, with the broker's code
├── UnreadableState          the stored state is corrupt or of a newer version; it is left as it is
├── EmbeddedServerMissing    no nats-server to embed (raised by ``embedded``)
├── SchedulerError           what the in-process scheduler raises
│   ├── SchedulerFull        no room for one more id
│   └── AlreadyRunning       its ``run`` is under way
└── ClientError              what ``TimerClient`` raises
    ├── CommandRejected      settled as rejected; ``code`` and ``outcome`` say why
    ├── OutcomeUnknown       stored, but no outcome came in time: repeat with the same command_id
    ├── NotStored            the broker did not confirm the command: repeat with the same command_id
    └── SleepInterrupted     the timer of a sleep was cancelled, replaced, or failed by hand
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from timer_service.wire.records import Outcome


class DurableTimerError(Exception):
    """The root: catch this for everything that this project raises on purpose."""


class BrokerError(DurableTimerError):
    """Something between us and the broker."""


class Ambiguous(BrokerError):
    """The reply is missing (time-out, connection lost): read back before deciding again."""


class Unavailable(BrokerError):
    """Nobody answers for this resource; nothing was stored."""


class WrongRevision(BrokerError):
    """Compare-and-set lost. ``actual`` is the revision that stands, None when the broker did not say."""

    def __init__(self, message: str, actual: int | None = None) -> None:
        super().__init__(message)
        self.actual = actual


class StorageFull(BrokerError):
    """The broker refused for want of room; nothing was stored. ``whose`` is set when it isn't the stream's own."""

    def __init__(self, message: str, whose: str | None = None) -> None:
        super().__init__(message)
        self.whose = whose


class Forbidden(BrokerError):
    """The account may not do this."""


class NotFound(BrokerError):
    """No such message, stream or consumer: ``err_code`` tells which, 0 when the broker gave none."""

    def __init__(self, message: str, err_code: int = 0) -> None:
        super().__init__(message)
        self.err_code = err_code


class RequestRefused(BrokerError):
    """Any other refusal. ``err_code`` is the broker's own code, 0 when it gave none."""

    def __init__(self, message: str, err_code: int = 0) -> None:
        super().__init__(message)
        self.err_code = err_code


class UnreadableState(DurableTimerError):
    """The stored state of a timer is corrupt or of a newer version; it is left as it is."""

    def __init__(self, timer_ref: str, message: str) -> None:
        super().__init__(f"{timer_ref}: {message}")
        self.timer_ref = timer_ref
        self.message = message


class SchedulerError(DurableTimerError):
    """What the in-process scheduler raises."""


class SchedulerFull(SchedulerError):
    """The scheduler holds as many ids as it may; nothing was changed. Replacing one of them is always possible."""


class AlreadyRunning(SchedulerError):
    """Somebody is in ``run`` of this queue or scheduler; there is one at a time."""


class ClientError(DurableTimerError):
    """What ``TimerClient`` raises."""


class CommandRejected(ClientError):
    """The command was settled as rejected: it changed nothing and will not be tried again."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"{outcome.code}: {outcome.message}")
        self.outcome = outcome
        self.code = outcome.code or ""


class OutcomeUnknown(ClientError):
    """The command is stored, but its outcome did not come in time.

    It will still be carried out. Repeating it with the same ``command_id`` is safe and tells its outcome.
    """

    def __init__(self, command_id: str, timer_ref: str) -> None:
        super().__init__(f"no outcome of command {command_id} yet; it is stored and will be carried out")
        self.command_id = command_id
        self.timer_ref = timer_ref


class NotStored(ClientError):
    """The broker did not confirm the command. When only its reply was lost (the cause is Ambiguous) it may have it.

    Repeating it with the same ``command_id`` is safe either way.
    """

    def __init__(self, message: str, command_id: str = "") -> None:
        super().__init__(message)
        self.command_id = command_id


class SleepInterrupted(ClientError):
    """The timer of a sleep ended otherwise than by its time: ``status`` is ``cancelled``, ``failed`` or ``replaced``.

    ``reason`` is what the cancel or fail said, None when it said nothing.
    """

    def __init__(self, timer_ref: str, status: str, reason: str | None) -> None:
        super().__init__(f"the sleep {timer_ref} was {status}" + (f": {reason}" if reason else ""))
        self.timer_ref = timer_ref
        self.status = str(status)
        self.reason = reason
