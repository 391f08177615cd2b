"""A contract waits for its signature: three reminders, a day apart, and then somebody else is told."""

from __future__ import annotations

import os

from pydantic import BaseModel

from notify_consumer import Answer, Context, Handlers, Resume, fail, retry

REMINDERS = 3
PAUSE_MS = int(os.environ.get("REMINDER_PAUSE_MS", "86400000"))

handlers = Handlers()


class Signature(BaseModel):
    """What the flow engine gave to the timer. A payload that is not this is put aside as dead, with the reason."""

    contract: str
    signer: str
    manager: str


@handlers.flow("contract", node="wait_for_signature", timeout_ms=30_000)
async def not_signed(resume: Resume, wanted: Signature, context: Context) -> Answer:
    """Called when a day has passed. Every wait in between is a durable timer, so nothing here has to run meanwhile."""
    sent = resume.retries_used
    if sent < REMINDERS:
        await send(wanted.signer, f"please sign {wanted.contract} (reminder {sent + 1} of {REMINDERS})", resume)
        context.logger.info("reminder.sent", contract=wanted.contract, number=sent + 1)
        return retry(delay_ms=PAUSE_MS)
    await send(wanted.manager, f"{wanted.signer} has not signed {wanted.contract}", resume)
    return fail("not_signed", f"{REMINDERS} reminders, no signature")


async def send(to: str, text: str, resume: Resume) -> None:
    """A real one gives the mail to a service, under the resume_id as its idempotency key: after a crash right here the
    handler is called again with the same resume."""
    print(f"to {to}: {text} [{resume.resume_id}]", flush=True)
