"""Commands of those who run the service: serve, provision, stats, doctor, dev, demo."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from timer_service import show
from timer_service.cli import diagnose
from timer_service.cli.arguments import Creds, Json, Nats
from timer_service.cli.session import connected, guarded, refuse, run
from timer_service.config import DEFAULT_NATS_URL, Settings
from timer_service.errors import Unavailable
from timer_service.jetstream.provision import Provisioner
from timer_service.options import WholeHelp, settings_command
from timer_service.wire.canonical import exact_json

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
    serve = settings_command(Settings, _serve, flags={"provision": ("--provision/--no-provision",)})
    app.command("serve", cls=WholeHelp)(serve)
    app.command("provision", cls=WholeHelp)(settings_command(Settings, _provision, only=("nats", "creds", *_SIZES)))
    app.command("doctor", cls=WholeHelp)(settings_command(Settings, _doctor, only=("nats", "creds", "driver", *_SIZES)))
    app.command()(stats)
    app.command()(dev)
    app.command()(demo)


def _serve(settings: Settings) -> None:
    """Run the timer service against a NATS server until SIGTERM."""
    from timer_service.app import serve
    from timer_service.logs import configure_logs, get_logger

    configure_logs()
    try:
        asyncio.run(serve(settings, get_logger()))
    except (OSError, Unavailable) as error:
        refuse(str(error))


def _provision(settings: Settings, as_json: Json = False) -> None:
    """Create the streams, buckets and consumers that are missing, and widen limits that are too small.

    Never deletes or empties anything. Repeating it does nothing.
    """
    done = run(_provisioned(settings))
    if as_json:
        _print_json({"done": done})
        return
    for line in done or ["nothing to do"]:
        typer.echo(line)


async def _provisioned(settings: Settings) -> list[str]:
    async with connected(settings.nats, settings.creds) as connection:
        return await Provisioner(connection, settings.sizes).provision()


def _doctor(settings: Settings, as_json: Json = False) -> None:
    """Check server, streams, consumers, permissions and clocks; say what is wrong and how to mend it."""
    checks = run(diagnose.examine(settings))
    if as_json:
        _print_json({"ok": all(check.ok for check in checks), "checks": [check.plain() for check in checks]})
    else:
        show.console().print(diagnose.checklist(checks), highlight=False, soft_wrap=True)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def stats(nats: Nats = DEFAULT_NATS_URL, creds: Creds = None, as_json: Json = False) -> None:
    """Show how full the streams are and what waits for the services."""
    found = run(diagnose.measure(nats, creds))
    if as_json:
        _print_json(found)
    else:
        show.console().print(diagnose.tables(found), highlight=False)


def dev(
    data: Annotated[Path, typer.Option(metavar="DIR", help="Where everything is kept.")] = Path(".durable-timer"),
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the broker on the loopback interface.")] = 4222,
    http: Annotated[str, typer.Option(metavar="HOST:PORT", help="Health of the timer service.")] = "127.0.0.1:8080",
    consumer_http: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Health of the notify consumer.")
    ] = "127.0.0.1:8081",
    handlers: Annotated[
        str | None, typer.Option(metavar="MODULE[:ATTRIBUTE]", help="Your handlers. Default: show and complete.")
    ] = None,
) -> None:
    """Run broker, timer service and notify consumer on this machine until Ctrl-C."""
    from timer_service import dev as development

    options = development.DevOptions(data, port, http, consumer_http, handlers or development.DEFAULT_HANDLERS)
    raise typer.Exit(guarded(lambda: development.dev(options)))


def demo() -> None:
    """See it work: timers that survive a kill of the service, on a broker of their own, in about 13 seconds."""
    from timer_service.demo import demo as play

    raise typer.Exit(guarded(play))


def _print_json(value: Any) -> None:
    sys.stdout.buffer.write(exact_json(value) + b"\n")
