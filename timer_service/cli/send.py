"""Commands that other services publish too: start, cancel, complete, retry, fail."""

from __future__ import annotations

import sys
import uuid
from enum import StrEnum
from typing import Annotated, Any

import typer

from timer_service import show
from timer_service.cli import arguments
from timer_service.cli.arguments import CommandId, Creds, Json, Name, Namespace, Nats, NoWait, Ref, TimeoutMs
from timer_service.cli.session import client, refuse, run
from timer_service.client import DEFAULT_TIMEOUT_MS, due_body
from timer_service.clock import SystemClock
from timer_service.config import DEFAULT_NATS_URL
from timer_service.domain.codes import Status
from timer_service.errors import CommandRejected, NotStored, OutcomeUnknown
from timer_service.wire.canonical import exact_json
from timer_service.wire.commands import Kind
from timer_service.wire.records import Outcome, encode

Given = Annotated[str, typer.Argument(metavar="TIMER_REF")]
Generation = Annotated[int, typer.Argument(metavar="GENERATION", min=0, help="As the resume carried it.")]
Fence = Annotated[int, typer.Argument(metavar="FENCE", min=1, help="As the resume carried it.")]
Delay = Annotated[str | None, typer.Option(metavar="DURATION", help="Due so long after now: 30m, 1h30m, 500ms.")]
DelayMs = Annotated[int | None, typer.Option(metavar="MS", help="The same in milliseconds.")]
At = Annotated[str | None, typer.Option(metavar="RFC3339", help="Due at this instant, such as 2030-01-01T09:00:00Z.")]
Part = Annotated[str | None, typer.Option(metavar="TEXT", help="One of the four parts of a flow's timer.")]


class IfExists(StrEnum):
    """What a start does to a timer that lives."""

    REJECT = "reject"
    REPLACE = "replace"


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    for command in (start, cancel, complete, retry, fail):
        app.command()(command)


def start(
    name: Name = None,
    namespace: Namespace = None,
    flow_id: Part = None,
    flow_version: Part = None,
    root_execution_id: Part = None,
    node_id: Part = None,
    delay: Delay = None,
    delay_ms: DelayMs = None,
    at: At = None,
    payload: Annotated[
        str | None, typer.Option(metavar="JSON|@FILE|-", help="Handed back unchanged when it fires.")
    ] = None,
    max_retries: Annotated[
        str, typer.Option(metavar="N|none", help="How often it may be armed again by an answer.")
    ] = "0",
    if_exists: Annotated[
        IfExists | None, typer.Option(help="For a timer that lives. Default: replace a name, reject a flow's.")
    ] = None,
    edges: Annotated[str | None, typer.Option(metavar="JSON", help="Edges of the flow's node.")] = None,
    command_id: CommandId = None,
    no_wait: NoWait = False,
    timeout_ms: TimeoutMs = DEFAULT_TIMEOUT_MS,
    nats: Nats = DEFAULT_NATS_URL,
    creds: Creds = None,
    as_json: Json = False,
) -> None:
    """Start a timer, named by --name or by the four parts of a flow's timer node."""
    lineage = {
        "flow_id": flow_id,
        "flow_version": flow_version,
        "root_execution_id": root_execution_id,
        "node_id": node_id,
    }
    body = {
        "timer": _key(name, namespace, lineage),
        "due": _due(delay, delay_ms, at, needed=True),
        "payload": None if payload is None else arguments.json_value(payload, "--payload"),
        "max_retries": arguments.retries(max_retries),
        "if_exists": if_exists and str(if_exists),
        "edges": arguments.json_object(edges, "--edges"),
    }
    run(_send("start", body, command_id, no_wait, timeout_ms, nats, creds, as_json))


def cancel(
    timer_ref: Ref = None,
    name: Name = None,
    namespace: Namespace = None,
    generation: Annotated[int | None, typer.Option(min=0, help="Cancel just this occurrence.")] = None,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Kept with the timer.")] = None,
    wait_ms: Annotated[
        int | None, typer.Option(min=0, metavar="MS", help="How long the start may still be on its way.")
    ] = None,
    command_id: CommandId = None,
    no_wait: NoWait = False,
    timeout_ms: TimeoutMs = DEFAULT_TIMEOUT_MS,
    nats: Nats = DEFAULT_NATS_URL,
    creds: Creds = None,
    as_json: Json = False,
) -> None:
    """Cancel a waiting timer: it never fires. The code too_late says that it had fired already."""
    ref = arguments.named_ref(timer_ref, name, namespace)
    body = {"timer_ref": ref, "generation": generation, "reason": reason, "wait_ms": wait_ms}
    run(_send("cancel", body, command_id, no_wait, timeout_ms, nats, creds, as_json))


def complete(
    timer_ref: Given,
    generation: Generation,
    fence: Fence,
    command_id: CommandId = None,
    no_wait: NoWait = False,
    timeout_ms: TimeoutMs = DEFAULT_TIMEOUT_MS,
    nats: Nats = DEFAULT_NATS_URL,
    creds: Creds = None,
    as_json: Json = False,
) -> None:
    """Answer a resume: the work is done."""
    body = _occurrence(timer_ref, generation, fence)
    run(_send("complete", body, command_id, no_wait, timeout_ms, nats, creds, as_json))


def retry(
    timer_ref: Given,
    generation: Generation,
    fence: Fence,
    delay: Delay = None,
    delay_ms: DelayMs = None,
    at: At = None,
    command_id: CommandId = None,
    no_wait: NoWait = False,
    timeout_ms: TimeoutMs = DEFAULT_TIMEOUT_MS,
    nats: Nats = DEFAULT_NATS_URL,
    creds: Creds = None,
    as_json: Json = False,
) -> None:
    """Answer a resume: wait again, for the last delay when no other is given."""
    body = {**_occurrence(timer_ref, generation, fence), "due": _due(delay, delay_ms, at, needed=False)}
    run(_send("retry", body, command_id, no_wait, timeout_ms, nats, creds, as_json))


def fail(
    timer_ref: Given,
    generation: Generation,
    fence: Fence,
    failure_code: Annotated[str, typer.Argument(metavar="CODE", help="Of a-z, 0-9 and _.")] = "failed",
    message: Annotated[str | None, typer.Option(metavar="TEXT", help="Kept in the archive.")] = None,
    command_id: CommandId = None,
    no_wait: NoWait = False,
    timeout_ms: TimeoutMs = DEFAULT_TIMEOUT_MS,
    nats: Nats = DEFAULT_NATS_URL,
    creds: Creds = None,
    as_json: Json = False,
) -> None:
    """Answer a resume: the work failed for good."""
    body = {**_occurrence(timer_ref, generation, fence), "failure_code": failure_code, "message": message}
    run(_send("fail", body, command_id, no_wait, timeout_ms, nats, creds, as_json))


# -- bodies ---------------------------------------------------------------------------------------------------


def _key(name: str | None, namespace: str | None, lineage: dict[str, str | None]) -> dict[str, str]:
    given = {part: value for part, value in lineage.items() if value is not None}
    if name is not None and not given:
        return arguments.name_key(name, namespace)
    if name is None and namespace is None and len(given) == len(lineage):
        return given
    raise typer.BadParameter("give --name, or all of --flow-id --flow-version --root-execution-id --node-id")


def _due(delay: str | None, delay_ms: int | None, at: str | None, *, needed: bool) -> dict[str, Any] | None:
    forms = [form for form in (delay, delay_ms, at) if form is not None]
    if len(forms) > 1 or (needed and not forms):
        raise typer.BadParameter("give exactly one of --delay, --delay-ms and --at")
    return due_body(delay_ms if delay is None else arguments.duration_ms(delay), at, None)


def _occurrence(timer_ref: str, generation: int, fence: int) -> dict[str, Any]:
    return {"timer_ref": arguments.derived_ref(timer_ref), "generation": generation, "fence": fence}


# -- sending --------------------------------------------------------------------------------------------------


async def _send(
    kind: Kind,
    body: dict[str, Any],
    command_id: str | None,
    no_wait: bool,
    timeout_ms: int,
    url: str,
    creds: str | None,
    as_json: bool,
) -> None:
    chosen = uuid.uuid4().hex if command_id is None else command_id
    async with client(url, creds) as timers:
        try:
            outcome = await timers.send(kind, body, command_id=chosen, wait=not no_wait, timeout_ms=timeout_ms)
        except CommandRejected as rejected:
            outcome = rejected.outcome
        except OutcomeUnknown as unknown:
            refuse(f"{unknown}. Does `durable-timer serve` run? Asking again: --command-id {chosen}")
        except NotStored as error:
            refuse(f"{error}. `durable-timer doctor` says what is wrong")
        except ValueError as error:
            refuse(str(error), 2)
    if outcome is None:
        _print_stored(kind, chosen, body, as_json)
    else:
        _print(kind, outcome, as_json)


def _print_stored(kind: Kind, command_id: str, body: dict[str, Any], as_json: bool) -> None:
    """What is known when nobody waits for the outcome: an outcome's fields, without a status."""
    ref = body["timer_ref"] if "timer_ref" in body else arguments.derived_ref(body["timer"])
    if as_json:
        nothing = dict.fromkeys(Outcome.__struct_fields__)
        typer.echo(exact_json({**nothing, "command_id": command_id, "message": "stored", "timer_ref": ref}).decode())
    else:
        typer.echo(f"✓ {kind} stored as command {command_id}\n  {ref}")


def _print(kind: Kind, outcome: Outcome, as_json: bool) -> None:
    if as_json:
        sys.stdout.buffer.write(encode(outcome) + b"\n")
    else:
        show.console(stderr=outcome.status == Status.REJECTED).print(
            show.outcome(kind, outcome, SystemClock().now_ms()), highlight=False, soft_wrap=True
        )
    if outcome.status == Status.REJECTED:
        raise typer.Exit(1)
