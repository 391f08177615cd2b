"""Commands of those who run the service: serve, provision."""

from __future__ import annotations

import asyncio

import typer

from timer_service.cli.session import connected, refuse, run
from timer_service.config import Settings
from timer_service.jetstream.provision import Provisioner
from timer_service.logs import configure_logs, get_logger
from timer_service.options import settings_command

_SIZES = (
    "replicas",
    "state_max_bytes",
    "snapshots_max_bytes",
    "commands_max_bytes",
    "resumes_max_bytes",
    "terminals_max_bytes",
    "archive_max_age_s",
)


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command("serve")(settings_command(Settings, _serve, flags={"provision": ("--provision/--no-provision",)}))
    app.command("provision")(settings_command(Settings, _provision, only=("nats", "creds", *_SIZES)))


def _serve(settings: Settings) -> None:
    """Run the timer service against a NATS server until SIGTERM."""
    from timer_service.app import serve

    if settings.driver == "native":
        refuse("--driver native is not built yet; --driver heap is the one there is", 2)
    configure_logs()
    try:
        asyncio.run(serve(settings, get_logger()))
    except OSError as error:
        refuse(str(error))


def _provision(settings: Settings) -> None:
    """Create the streams, buckets and consumers that are missing, and widen limits that are too small.

    Never deletes or empties anything. Repeating it does nothing.
    """
    done = run(_provisioned(settings))
    for line in done or ["nothing to do"]:
        typer.echo(line)


async def _provisioned(settings: Settings) -> list[str]:
    async with connected(settings.nats, settings.creds) as connection:
        return await Provisioner(connection, settings.sizes).provision()
