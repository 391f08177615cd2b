"""What happens when a driver did not answer in time."""

from __future__ import annotations

from notify_consumer import Handlers, Resume

handlers = Handlers()


@handlers.name("ride-offer/")
async def ask_the_next(resume: Resume) -> None:
    """A real dispatcher would look for the next driver here, and offer the ride to them."""
    print(f"ride {resume.payload['ride']}: {resume.payload['driver']} did not answer in time", flush=True)
