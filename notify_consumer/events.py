"""The names of log events. Data goes into keys."""

from __future__ import annotations

from typing import Final

SERVICE_STARTING: Final = "service.starting"
SERVICE_READY: Final = "service.ready"
SERVICE_NOT_READY: Final = "service.not_ready"
SERVICE_DRAINING: Final = "service.draining"
SERVICE_STOPPED: Final = "service.stopped"
HTTP_LISTENING: Final = "http.listening"
CONSUMER_CREATED: Final = "consumer.created"
RESUME_RECEIVED: Final = "resume.received"
RESUME_REPEATED: Final = "resume.repeated"
RESUME_UNREADABLE: Final = "resume.unreadable"
RESUME_DEAD: Final = "resume.dead"
HANDOFF_FINISHED: Final = "handoff.finished"
HANDOFF_FAILED: Final = "handoff.failed"
HANDOFF_CUT_OFF: Final = "handoff.cut_off"
ACTION_FAILED: Final = "action.failed"
LEASE_LOST: Final = "lease.lost"
FEEDBACK_SETTLED: Final = "feedback.settled"
FEEDBACK_DELAYED: Final = "feedback.delayed"
FEEDBACK_FAILED: Final = "feedback.failed"
OUTBOX_UNAVAILABLE: Final = "outbox.unavailable"
OUTBOX_AVAILABLE: Final = "outbox.available"
WORK_FAILED: Final = "work.failed"
OUTBOX_PRUNED: Final = "outbox.pruned"
