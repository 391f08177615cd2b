"""What ``doctor`` and ``stats`` find out on the broker, and how they show it."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from timer_service import show
from timer_service.cli.durability import durability_of
from timer_service.cli.session import connected, publisher
from timer_service.clock import SystemClock
from timer_service.config import Settings
from timer_service.errors import BrokerError, NotFound
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.permissions import missing_permissions
from timer_service.jetstream.provision import Finding, Provisioner
from timer_service.jetstream.watch import MAX_SKEW_MS, Watch
from timer_service.urls import shown_url

_HINTS = {
    "server_too_old": "upgrade nats-server",
    "permission_denied": "grant the account what the message names",
    "subject_taken": "take the subject from that stream, or delete it after its messages were saved",
    "schedules_unsupported": "run `durable-timer provision` on nats-server 2.12 or newer; or use --driver heap",
    "bad_policy": "change it with `nats stream edit` (or `nats consumer edit`); what can't be changed in place must "
    "be created anew after its messages were saved",
    "clock_skew": "let both machines follow NTP, then look again",
}


class Check(msgspec.Struct, frozen=True):
    """One line of the checklist; ``code`` and ``hint`` are set where something is wrong."""

    resource: str
    ok: bool
    message: str
    code: str | None = None
    hint: str | None = None

    def plain(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__struct_fields__}


async def examine(settings: Settings) -> list[Check]:
    """All checks, in the order of the way from the server to the clocks. Raises BrokerError when it can't look."""
    async with connected(settings.nats, settings.creds) as connection:
        native = settings.driver == "native"
        try:
            findings = await Provisioner(connection, settings.sizes, native=native).check()
        except BrokerError as error:
            findings = await missing_permissions(connection, native=native)
            if not findings:
                raise
            return [_wrong(finding) for finding in (*findings, Finding("broker_unavailable", "JetStream", str(error)))]
        findings += await missing_permissions(connection, native=native)
        checks = [_of("nats-server", f"version {connection.server_version}", findings)]
        checks += [_of(name, "as it must be", findings) for name in _resources()]
        known = {check.resource for check in checks}
        checks += [_wrong(finding) for finding in findings if finding.resource not in known]
        checks.append(await _clock(connection))
        return [*checks, *await _durability(connection)]


async def _durability(connection: Connection) -> list[Check]:
    """Nothing that could be wrong: what was chosen, in words."""
    try:
        level = await durability_of(connection)
    except BrokerError:
        return []  # told above
    return [] if level is None else [Check("durability", True, level.text)]


def _resources() -> list[str]:
    streams = [spec.name for spec in topology.streams(topology.Sizes())]
    return streams + [f"{spec.stream} > {spec.name}" for spec in topology.CONSUMERS]


def _of(resource: str, good: str, findings: list[Finding]) -> Check:
    mine = [finding for finding in findings if finding.resource == resource]
    if not mine:
        return Check(resource, True, good)
    return _wrong(Finding(mine[0].code, resource, "; ".join(finding.message for finding in mine)))


def _wrong(finding: Finding) -> Check:
    return Check(finding.resource, False, finding.message, finding.code, _HINTS.get(finding.code))


async def _clock(connection: Connection) -> Check:
    async with publisher(connection) as asker:
        watch = Watch(asker, SystemClock())
        try:
            await watch.state_stream()
        except NotFound:
            return Check("clock", False, "not compared: it takes the state stream, which is missing", "clock_unknown")
        except BrokerError as error:
            return Check("clock", False, f"could not be compared: {error}", "clock_unknown")
    if watch.skew_ms is None:
        return Check("clock", False, "the server does not tell its time", "clock_unknown")
    if abs(watch.skew_ms) <= MAX_SKEW_MS:
        return Check("clock", True, f"{abs(watch.skew_ms):.0f} ms off the broker's (at most {MAX_SKEW_MS} is safe)")
    text = f"this machine's is {watch.skew_ms:.0f} ms off the broker's; at most {MAX_SKEW_MS} is safe"
    return _wrong(Finding("clock_skew", "clock", text))


def checklist(checks: list[Check]) -> Text:
    """The checks as a list to tick off, each failed one with what to do about it."""
    text = Text()
    for check in checks:
        text.append("✓ " if check.ok else "✗ ", "green" if check.ok else "red")
        text.append(f"{check.resource}: ", "bold").append(f"{show.clean(check.message)}\n")
        if check.hint is not None:
            text.append(f"    → {check.hint}\n", "yellow")
    wrong = sum(not check.ok for check in checks)
    text.append(f"{wrong} of {len(checks)} checks failed" if wrong else "all is well", "red" if wrong else "green")
    return text


# -- stats ----------------------------------------------------------------------------------------------------


async def measure(url: str, creds: str | None) -> dict[str, Any]:
    """Server, streams and consumers in numbers; a missing stream or consumer is null. Raises BrokerError."""
    async with connected(url, creds) as connection:
        level = await durability_of(connection)
        return {
            "server": {"url": shown_url(url), "version": connection.server_version},
            "durability": None if level is None else level.plain(),
            "streams": {spec.name: await _stream(connection, spec.name) for spec in topology.streams(topology.Sizes())},
            "consumers": {spec.name: await _consumer(connection, spec) for spec in topology.CONSUMERS},
        }


async def _stream(connection: Connection, name: str) -> dict[str, Any] | None:
    try:
        info = await connection.api(f"STREAM.INFO.{name}")
    except NotFound:
        return None
    used, limit = info["state"]["bytes"], info["config"].get("max_bytes", -1)
    percent = round(100 * used / limit, 2) if limit > 0 else None
    return {"messages": info["state"]["messages"], "bytes": used, "max_bytes": limit, "percent": percent}


async def _consumer(connection: Connection, spec: topology.ConsumerSpec) -> dict[str, Any] | None:
    try:
        info = await connection.api(f"CONSUMER.INFO.{spec.stream}.{spec.name}")
    except NotFound:
        return None
    return {
        "stream": spec.stream,
        "pending": info["num_pending"],
        "unacknowledged": info["num_ack_pending"],
        "redelivered": info["num_redelivered"],
        "readers_waiting": info["num_waiting"],
    }


def tables(found: dict[str, Any]) -> Group:
    """The numbers for people."""
    server = found["server"]
    head = [f"nats-server {server['version']} at {server['url']}"]
    if found["durability"] is not None:
        head.append(f"durability: {found['durability']['text']}")
    return Group(*head, "", _streams(found), "", _consumers(found))


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _streams(found: dict[str, Any]) -> Table:
    table = _table("stream", "messages", "size", "limit", "full")
    for name, numbers in found["streams"].items():
        if numbers is None:
            table.add_row(name, Text("missing", "red"), "", "", "")
            continue
        limit = show.size(numbers["max_bytes"]) if numbers["max_bytes"] > 0 else "none"
        percent = "–" if numbers["percent"] is None else f"{numbers['percent']:.1f} %"
        table.add_row(name, f"{numbers['messages']:,}", show.size(numbers["bytes"]), limit, percent)
    return table


def _consumers(found: dict[str, Any]) -> Table:
    table = _table("consumer", "waiting", "unacked", "redelivered", "requests")
    for name, numbers in found["consumers"].items():
        if numbers is None:
            table.add_row(name, Text("missing", "red"), "", "", "")
            continue
        fields = ("pending", "unacknowledged", "redelivered", "readers_waiting")
        table.add_row(name, *(f"{numbers[field]:,}" for field in fields))
    return table
