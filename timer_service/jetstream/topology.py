"""Every name, subject and policy on the broker, once."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

STATE_BUCKET = "DURABLE_TIMER_STATE"
STATE_STREAM = f"KV_{STATE_BUCKET}"
LEASE_BUCKET = "DURABLE_TIMER_LEASES"
LEASE_STREAM = f"KV_{LEASE_BUCKET}"
COMMANDS = "DURABLE_TIMER_COMMANDS"
SNAPSHOTS = "DURABLE_TIMER_SNAPSHOTS"
SCHEDULES = "DURABLE_TIMER_SCHEDULES"
RESUMES = "DURABLE_TIMER_RESUMES"
TERMINALS = "DURABLE_TIMER_TERMINALS"
REJECTIONS = "DURABLE_TIMER_REJECTIONS"
OUTBOX_BUCKET = "NOTIFY_CONSUMER_OUTBOX"

COMMAND_CONSUMER = "DURABLE_TIMER_COMMAND_SERVICE"
WAKE_CONSUMER = "DURABLE_TIMER_WAKE_SERVICE"
RESUME_CONSUMER = "NOTIFY_TRIGGERS_DURABLE_TIMER_RESUME"

STATE_PREFIX = f"$KV.{STATE_BUCKET}."
STATE_FILTER = f"{STATE_PREFIX}>"
COMMAND_FILTER = "durable_timer.commands.>"
WAKE_PREFIX = "durable_timer.wake.v1."
WAKE_FILTER = f"{WAKE_PREFIX}>"
SCHEDULE_PREFIX = "durable_timer.schedule.v1."
SCHEDULE_FILTER = f"{SCHEDULE_PREFIX}>"
SNAPSHOT_PREFIX = "durable_timer.snapshot.v1."
TERMINAL_PREFIX = "durable_timer.terminal.v1."
REJECTED_PREFIX = "durable_timer.rejected.v1."
LEASE_PREFIX = f"$KV.{LEASE_BUCKET}."
LEASE_ASK_PREFIX = "_INBOX.durable_timer_lease."
DRIVER_LEASE = "driver"
TIMER_SERVICE, NOTIFY_CONSUMER = "timer_service", "notify_consumer"
RESUME_SUBJECT = "triggers.v2.durable_timer.resume.v1"

REPLY_HEADER = "Durable-Timer-Reply"
EXPECTED_HEADER = "Nats-Expected-Last-Subject-Sequence"
MSG_ID_HEADER = "Nats-Msg-Id"
TTL_HEADER = "Nats-TTL"
KV_OPERATION_HEADER = "KV-Operation"
STORED_HEADER = "Nats-Time-Stamp"
OCCURRENCE_HEADER = "Durable-Timer-Occurrence"
"""A schedule's id. A header of our own: the broker keeps it on the wake, while it strips its own ones."""
SCHEDULE_HEADER = "Nats-Schedule"
SCHEDULE_TARGET_HEADER = "Nats-Schedule-Target"
SCHEDULE_TTL_HEADER = "Nats-Schedule-TTL"
SCHEDULES_FLAG = "allow_msg_schedules"

WAKE_TTL_S = 120
ACK_WAIT_S = 5
DUPLICATE_WINDOW_S = 120
REJECTIONS_MAX_AGE_S = 7 * 86_400
REJECTIONS_MAX_BYTES = 256 * 2**20
SCHEDULES_MAX_BYTES = 256 * 2**20
LEASES_MAX_BYTES = 2**20
OUTBOX_MAX_BYTES = 2**30
NAME_TTL_S = 600
"""So long the lease bucket remembers the name of a process that is gone."""
NS = 1_000_000_000


def state_subject(timer_ref: str) -> str:
    return STATE_PREFIX + timer_ref


def wake_subject(timer_ref: str) -> str:
    return WAKE_PREFIX + timer_ref


def schedule_subject(timer_ref: str) -> str:
    return SCHEDULE_PREFIX + timer_ref


def snapshot_subject(timer_ref: str, generation: int) -> str:
    return f"{SNAPSHOT_PREFIX}{timer_ref}.{generation}"


def snapshot_owner(subject: str) -> str:
    """The timer_ref in the subject of a snapshot."""
    return subject[len(SNAPSHOT_PREFIX) :].partition(".")[0]


def terminal_subject(timer_ref: str) -> str:
    return TERMINAL_PREFIX + timer_ref


def name_lease(program: str, instance: str) -> str:
    """The key of the lease on a process's name: any name gives a safe key, and no two names the same."""
    name = base64.b32encode(instance.encode("utf-8", "surrogatepass")).decode().rstrip("=").lower()
    return f"instance.{program}.{name}"


def lease_subject(key: str) -> str:
    return LEASE_PREFIX + key


def lease_ask_subject(process: str) -> str:
    """Where the holder of a lease can be asked: nobody but this process listens there."""
    return LEASE_ASK_PREFIX + process


def rejected_subject(kind: str) -> str:
    return REJECTED_PREFIX + kind


def command_subject(kind: str) -> str:
    return f"durable_timer.commands.{kind}.v1"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Room and replicas, from the settings."""

    replicas: int = 1
    state_bytes: int = 2**30
    snapshots_bytes: int = 2**30
    commands_bytes: int = 2**30
    resumes_bytes: int = 2**30
    terminals_bytes: int = 2 * 2**30
    archive_max_age_s: int = 90 * 86_400


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A stream as it is created, and the fields whose drift endangers waiting timers.

    ``fixed`` must be as given; ``widened`` may be raised by ``provision``, never lowered.
    ``max_age`` is in nanoseconds as on the wire; 0 is "never".
    """

    name: str
    subjects: tuple[str, ...]
    max_bytes: int
    retention: str = "limits"
    discard: str = "new"
    max_age: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, replicas: int) -> dict[str, Any]:
        """The configuration for ``$JS.API.STREAM.CREATE``."""
        return {
            "name": self.name,
            "subjects": list(self.subjects),
            "retention": self.retention,
            "storage": "file",
            "discard": self.discard,
            "max_age": self.max_age,
            "max_bytes": self.max_bytes,
            "max_msgs": -1,
            "max_msg_size": -1,
            "max_msgs_per_subject": -1,
            "max_consumers": -1,
            "num_replicas": replicas,
            "duplicate_window": _window(self.max_age),
            **self.options,
        }


def _window(max_age: int) -> int:
    window = DUPLICATE_WINDOW_S * NS
    return min(window, max_age) if max_age else window


_KV_OPTIONS = {
    "max_msgs_per_subject": 1,
    "allow_direct": True,
    "allow_rollup_hdrs": True,
    "deny_delete": True,
    "allow_msg_ttl": True,
}


def streams(sizes: Sizes) -> tuple[StreamSpec, ...]:
    """All streams, in the order in which they are created."""
    return (
        StreamSpec(STATE_STREAM, (STATE_FILTER,), sizes.state_bytes, options=_KV_OPTIONS),
        StreamSpec(LEASE_STREAM, (f"{LEASE_PREFIX}>",), LEASES_MAX_BYTES, options=_KV_OPTIONS),
        StreamSpec(
            SNAPSHOTS,
            (f"{SNAPSHOT_PREFIX}>",),
            sizes.snapshots_bytes,
            options={"allow_direct": True},
        ),
        StreamSpec(
            TERMINALS,
            (f"{TERMINAL_PREFIX}>",),
            sizes.terminals_bytes,
            max_age=sizes.archive_max_age_s * NS,
            options={"allow_direct": True},
        ),
        StreamSpec(
            SCHEDULES,
            (SCHEDULE_FILTER, WAKE_FILTER),
            SCHEDULES_MAX_BYTES,
            discard="old",
            options={"allow_msg_ttl": True, SCHEDULES_FLAG: True, "allow_direct": True},
        ),
        StreamSpec(
            RESUMES,
            (RESUME_SUBJECT,),
            sizes.resumes_bytes,
            retention="workqueue",
            options={"allow_direct": True},
        ),
        StreamSpec(
            REJECTIONS,
            (f"{REJECTED_PREFIX}>",),
            REJECTIONS_MAX_BYTES,
            discard="old",
            max_age=REJECTIONS_MAX_AGE_S * NS,
        ),
        StreamSpec(COMMANDS, (COMMAND_FILTER,), sizes.commands_bytes, retention="workqueue"),
    )


def outbox(max_bytes: int = OUTBOX_MAX_BYTES, bucket: str = OUTBOX_BUCKET) -> StreamSpec:
    """The bucket of a notify consumer that runs with ``--outbox nats``; the timer service has nothing to do with it.

    What is done with goes by its sequence, so messages may be deleted.
    """
    options = {"max_msgs_per_subject": 1, "allow_direct": True}
    return StreamSpec(f"KV_{bucket}", (f"$KV.{bucket}.>",), max_bytes, options=options)


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    """A durable pull consumer with explicit acks and no limit on pending ones (the pull window bounds memory)."""

    stream: str
    name: str
    filter_subject: str

    def config(self) -> dict[str, Any]:
        return {
            "durable_name": self.name,
            "name": self.name,
            "filter_subject": self.filter_subject,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": ACK_WAIT_S * NS,
            "max_deliver": -1,
            "max_ack_pending": -1,
            "max_waiting": 512,
            "replay_policy": "instant",
        }


COMMAND_SERVICE = ConsumerSpec(COMMANDS, COMMAND_CONSUMER, COMMAND_FILTER)
WAKE_SERVICE = ConsumerSpec(SCHEDULES, WAKE_CONSUMER, WAKE_FILTER)
RESUME_SERVICE = ConsumerSpec(RESUMES, RESUME_CONSUMER, RESUME_SUBJECT)
CONSUMERS = (COMMAND_SERVICE, WAKE_SERVICE, RESUME_SERVICE)


_API_WORDS = "$JS.API.ACK._INBOX.STREAM.CONSUMER.MSG.DIRECT.INFO.NAMES.CREATE.UPDATE.DELETE.NEXT.GET"
_NAMES = {
    word.lower(): word
    for text in (
        _API_WORDS,
        f"{LEASE_ASK_PREFIX}instance.{TIMER_SERVICE}.{NOTIFY_CONSUMER}",
        *(text for spec in (*streams(Sizes()), outbox()) for text in (spec.name, *spec.subjects)),
        *(spec.name for spec in CONSUMERS),
    )
    for word in text.removesuffix(".>").split(".")
}
"""Every token that is no value, by its lower-case form."""


def as_granted(subject: str) -> str:
    """What to write into the permissions for ``subject``: what follows the names becomes ``>``. Case is restored
    where it got lost (nats-py lower-cases what the broker complains of)."""
    names: list[str] = []
    for token in subject.split("."):
        name = _NAMES.get(token.lower())
        if name is None:
            return ".".join([*names, ">"]) if names else subject
        names.append(name)
    return ".".join(names)


def stream_of(subject: str) -> str | None:
    """The stream that a subject of ours, or a request about it, belongs to."""
    for spec in (*streams(Sizes()), outbox()):
        if spec.name in subject.split(".") or any(subject.startswith(own.removesuffix(">")) for own in spec.subjects):
            return spec.name
    return None


def covers(subject: str, other: str) -> bool:
    """Whether all messages on the subject ``other`` are on ``subject`` too; both may have wildcards."""
    wide, narrow = subject.split("."), other.split(".")
    if wide[-1] == ">":
        wide, narrow = wide[:-1], narrow[: len(wide) - 1] if len(narrow) >= len(wide) else []
    return len(wide) == len(narrow) and all(
        have == want or (want == "*" and have != ">") for want, have in zip(wide, narrow, strict=True)
    )


def is_literal_subject(subject: str, prefix: str = "") -> bool:
    """Whether this is safe to publish on: printable ASCII, no wildcard, no empty token, below ``prefix``.

    Anything else could break the whole connection.
    """
    return (
        subject.startswith(prefix)
        and 0 < len(subject) <= 512
        and subject.isascii()
        and subject.isprintable()
        and not any(char in subject for char in " *>")
        and all(subject.split("."))
    )
