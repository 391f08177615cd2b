"""What a handler may answer, and the command that tells it to the timer service."""

from __future__ import annotations

import re
from typing import Any, assert_never

import msgspec

from notify_consumer.outbox.base import Feedback
from notify_consumer.resume import Resume
from timer_service.domain.model import MAX_DELAY_MS, MAX_DUE_MS, MIN_DUE_MS

MAX_MESSAGE_BYTES = 1024
_CODE = re.compile(r"[a-z0-9_]{1,64}")


class Done(msgspec.Struct, frozen=True):
    """The work is done: the timer completes."""


class Retry(msgspec.Struct, frozen=True):
    """Wait again: the timer's next generation. With neither field its last delay is repeated."""

    delay_ms: int | None = None
    at_ms: int | None = None

    def __post_init__(self) -> None:
        if self.delay_ms is not None and self.at_ms is not None:
            raise ValueError("give delay_ms or at_ms, not both")
        _check_int("delay_ms", self.delay_ms, 1, MAX_DELAY_MS)
        _check_int("at_ms", self.at_ms, MIN_DUE_MS, MAX_DUE_MS)


class Fail(msgspec.Struct, frozen=True):
    """The work failed for good: the timer ends as failed."""

    code: str
    message: str | None = None

    def __post_init__(self) -> None:
        if type(self.code) is not str or not _CODE.fullmatch(self.code):
            raise ValueError(f"a failure code has 1 to 64 of a-z, 0-9 and _, not {self.code!r}")
        if self.message is None:
            return
        if type(self.message) is not str:
            raise TypeError(f"a failure message is a str, not {type(self.message).__name__}")
        if len(self.message.encode()) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a failure message has at most {MAX_MESSAGE_BYTES} bytes")


Answer = Done | Retry | Fail


def done() -> Done:
    """The work is done. Returning None from a handler means the same."""
    return Done()


def retry(delay_ms: int | None = None, *, at_ms: int | None = None) -> Retry:
    """Wait again for ``delay_ms`` (1 to 100 years), or until ``at_ms`` (epoch milliseconds, up to the year 2200).

    With neither the timer's last delay is repeated. Raises ValueError for what the timer service would refuse.
    """
    return Retry(delay_ms, at_ms)


def fail(code: str, message: str | None = None) -> Fail:
    """Failed for good. ``code`` is of ``[a-z0-9_]{1,64}`` (ValueError otherwise); ``message`` is cut at 1,024 bytes."""
    return Fail(code, _clipped(message) if type(message) is str else message)


def _check_int(name: str, value: int | None, least: int, most: int) -> None:
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise ValueError(f"{name} is an integer from {least} to {most}, not {value!r}")


def _clipped(text: str) -> str:
    raw = text.encode("utf-8", "replace")
    return raw[:MAX_MESSAGE_BYTES].decode("utf-8", "ignore")


def feedback_of(resume: Resume, answer: Answer) -> Feedback:
    """The command for ``answer``. Its command_id follows from the resume, so that a repeated one is recognised."""
    body: dict[str, Any] = {
        "v": 1,
        "command_id": f"notify:{resume.resume_id}",
        "timer_ref": resume.timer_ref,
        "generation": resume.generation,
        "fence": resume.fence,
    }
    match answer:
        case Done():
            return Feedback("complete", body)
        case Retry():
            return Feedback("retry", {**body, **_due(answer)})
        case Fail():
            said = {} if answer.message is None else {"message": answer.message}
            return Feedback("fail", {**body, "failure_code": answer.code, **said})
        case _:
            assert_never(answer)


def _due(answer: Retry) -> dict[str, Any]:
    given = {"delay_ms": answer.delay_ms, "at_ms": answer.at_ms}
    due = {name: value for name, value in given.items() if value is not None}
    return {"due": due} if due else {}
