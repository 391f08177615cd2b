"""What happens when the payment window of an order has passed."""

from __future__ import annotations

from notify_consumer import Handlers, Resume

handlers = Handlers()


@handlers.name("payment-window/")
async def cancel_order(resume: Resume) -> None:
    """A real shop would cancel the order in its database here, if it is not paid; doing it twice must be harmless."""
    print(f"order {resume.payload['order']} was not paid in time: cancelled", flush=True)
