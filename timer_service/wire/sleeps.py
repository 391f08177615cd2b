"""How a durable sleep is told from other timers: by its payload, so that any key may be slept on.

``TimerClient.sleep`` starts a timer with ``SLEEP_PAYLOAD`` and answers its resume itself. Whoever takes resumes in and
finds this payload has nobody to hand it to: ``Complete`` is the answer, with ``answer_id`` as command_id, so that it
does not matter how many give it.
"""

from __future__ import annotations

from typing import Final

from timer_service.wire.canonical import payload_sha256

SLEEP_NAMESPACE: Final = "sleep"
SLEEP_PAYLOAD: Final = {"durable_timer": "sleep"}
SLEEP_SHA256: Final = payload_sha256(SLEEP_PAYLOAD)


def answer_id(resume_id: str) -> str:
    """The command_id of every answer to a resume by the notify consumer or on its behalf."""
    return f"notify:{resume_id}"
