"""Creating what is missing on the broker, and saying precisely what is wrong with what is there.

Nothing is ever deleted or emptied, and neither retention nor storage is changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from timer_service.errors import BrokerError, Forbidden, NotFound
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.topology import ConsumerSpec, Sizes, StreamSpec

MIN_SERVER = (2, 12, 0)
UNSUPPORTED = "schedules_unsupported"
STORE_FAILED = 10049
STORE_TRIES, _STORE_AGAIN_S = 6, 0.2
BLOCKING = frozenset({"missing", "subject_taken"})
"""Findings that leave the ring nothing to run on."""

ACCOUNT = "account"
Api = Callable[..., Any]


class Finding(msgspec.Struct, frozen=True):
    """Something wrong on the broker: a code, the resource, and a sentence that says what is and what must be."""

    code: str
    resource: str
    message: str


class Provisioner:
    """Works on one account. All its methods may be repeated."""

    def __init__(self, connection: Connection, sizes: Sizes, *, native: bool = False) -> None:
        self._api = connection.api
        self._connection = connection
        self._sizes = sizes
        self._native = native
        self._streams = topology.streams(sizes)

    async def provision(self) -> list[str]:
        """Create what is missing and widen what is safe to widen; returns what was done, one line each.

        Raises BrokerError, naming the resource that could not be made.
        """
        done: list[str] = []
        for spec in self._streams:
            done += await self._provision_stream(spec)
        done += await self._allow_schedules()
        for consumer in topology.CONSUMERS:
            done += await self._provision_consumer(consumer)
        return done

    async def create_missing(self) -> list[str]:
        """As ``provision``, but leaves what is there as it is."""
        done: list[str] = []
        for spec in self._streams:
            if await self._info(f"STREAM.INFO.{spec.name}") is None:
                done += await self._create_stream(spec)
        for consumer in topology.CONSUMERS:
            done += await self._provision_consumer(consumer)
        return done

    async def check(self) -> list[Finding]:
        """What keeps waiting timers from being safe here; empty when all is well. Raises BrokerError."""
        findings = self._check_server()
        present: list[dict[str, Any]] = []
        absent: list[dict[str, Any]] = []
        for spec in self._streams:
            answer = await self._looked_up(f"STREAM.INFO.{spec.name}", spec.name, findings)
            if answer is None:
                absent.append(spec.config(self._sizes.replicas))
            else:
                present.append(answer["config"])
                findings += check_stream(spec, answer["config"])
                findings += check_schedules(spec, answer["config"]) if self._native else []
        await self._name_owners(findings)
        account = await self._looked_up("INFO", ACCOUNT, findings)
        if account is not None:
            findings += check_account(account, present, absent)
        for consumer in topology.CONSUMERS:
            name = f"{consumer.stream} > {consumer.name}"
            answer = await self._looked_up(f"CONSUMER.INFO.{consumer.stream}.{consumer.name}", name, findings)
            if answer is not None:
                findings += check_consumer(consumer, answer["config"])
        return findings

    def _check_server(self) -> list[Finding]:
        version = self._connection.server_version
        if tuple(int(part) for part in version.split(".")) >= MIN_SERVER:
            return []
        wanted = ".".join(map(str, MIN_SERVER))
        return [Finding("server_too_old", "nats-server", f"version is {version}; it must be {wanted} or newer")]

    async def _looked_up(self, request: str, resource: str, findings: list[Finding]) -> dict[str, Any] | None:
        try:
            answer = await self._info(request)
        except Forbidden as error:
            findings.append(Finding("permission_denied", resource, str(error)))
            return None
        if answer is None:
            findings.append(Finding("missing", resource, "does not exist; run `durable-timer provision`"))
        return answer

    async def _name_owners(self, findings: list[Finding]) -> None:
        """Where a stream lacks its subject since a foreign one owns it, say so: provisioning can't help."""
        for index, finding in enumerate(findings):
            spec = next((spec for spec in self._streams if spec.name == finding.resource), None)
            if spec is None or not (finding.code == "missing" or finding.message.startswith("subjects is ")):
                continue
            for subject in spec.subjects:
                owner = await self._foreign_owner(spec, subject)
                if owner is not None:
                    lack = "does not exist, and its" if finding.code == "missing" else finding.message + ", but"
                    text = f"{lack} subject {subject} belongs to stream {owner}; free it there"
                    findings[index] = Finding("subject_taken", spec.name, text)

    async def _foreign_owner(self, spec: StreamSpec, subject: str) -> str | None:
        """A stream that takes (some of) ``subject`` and is not ours; None also when we may not ask."""
        try:
            names = (await self._api("STREAM.NAMES", {"subject": subject})).get("streams") or []
        except Forbidden:
            return None
        return next((name for name in names if name != spec.name), None)

    async def _info(self, request: str) -> dict[str, Any] | None:
        try:
            return await self._api(request)
        except NotFound:
            return None

    # -- streams ----------------------------------------------------------------------------------------------

    async def _provision_stream(self, spec: StreamSpec) -> list[str]:
        answer = await self._info(f"STREAM.INFO.{spec.name}")
        if answer is None:
            return await self._create_stream(spec)
        wider, changes = widened(spec, answer["config"])
        if not changes:
            return []
        await self._call(f"STREAM.UPDATE.{spec.name}", wider, spec.name)
        return [f"widened stream {spec.name}: {', '.join(changes)}"]

    async def _allow_schedules(self) -> list[str]:
        """Turn on what only the native driver needs; where the server refuses, that is told and all else is done."""
        spec = next(spec for spec in self._streams if spec.name == topology.SCHEDULES)
        config = (await self._api(f"STREAM.INFO.{spec.name}"))["config"]
        if config.get(topology.SCHEDULES_FLAG):
            return []
        try:
            answer = await self._api(f"STREAM.UPDATE.{spec.name}", config | {topology.SCHEDULES_FLAG: True})
        except BrokerError as error:
            return [f"left stream {spec.name} without {topology.SCHEDULES_FLAG}, so without --driver native: {error}"]
        if not answer["config"].get(topology.SCHEDULES_FLAG):
            return [f"left stream {spec.name} without {topology.SCHEDULES_FLAG}: the server does not know schedules"]
        return [f"widened stream {spec.name}: {topology.SCHEDULES_FLAG}"]

    async def _create_stream(self, spec: StreamSpec) -> list[str]:
        await self._call(f"STREAM.CREATE.{spec.name}", spec.config(self._sizes.replicas), spec.name)
        return [f"created stream {spec.name}"]

    async def _provision_consumer(self, spec: ConsumerSpec) -> list[str]:
        if await self._info(f"CONSUMER.INFO.{spec.stream}.{spec.name}") is not None:
            return []
        await create_consumer(self._connection, spec)
        return [f"created consumer {spec.name}"]

    async def _call(self, request: str, body: dict[str, Any], resource: str) -> None:
        """Where the broker can't make the store it is tried again: it may still be removing one of that name."""
        for tries_left in reversed(range(STORE_TRIES)):
            try:
                await self._api(request, body)
            except BrokerError as error:
                if not tries_left or getattr(error, "err_code", 0) != STORE_FAILED:
                    raise type(error)(f"{resource}: {error}") from error
                await asyncio.sleep(_STORE_AGAIN_S)
            else:
                return


async def create_consumer(connection: Connection, spec: ConsumerSpec) -> None:
    """Create a durable consumer; one that is there already with the same settings stays. Raises BrokerError."""
    body = {"stream_name": spec.stream, "config": spec.config(), "action": "create"}
    await connection.api(f"CONSUMER.CREATE.{spec.stream}.{spec.name}.{spec.filter_subject}", body)


# -- policies -----------------------------------------------------------------------------------------------

_MUST_BE_ON = {
    topology.STATE_STREAM: ("allow_msg_ttl",),
    topology.LEASE_STREAM: ("allow_msg_ttl",),
    topology.SCHEDULES: ("allow_msg_ttl",),
}
_MUST_BE_OFF = {
    topology.COMMANDS: ("allow_msg_ttl", "allow_rollup_hdrs"),
    topology.RESUMES: ("allow_msg_ttl", "allow_rollup_hdrs"),
}
_READ_BY = ("allow_direct",)
"""Without it nothing answers when an entry, a payload or a record is read."""
_NO_AGE = frozenset({topology.STATE_STREAM, topology.SNAPSHOTS, topology.COMMANDS, topology.RESUMES})
_KEEPS_OLD = _NO_AGE | {topology.TERMINALS}


def check_stream(spec: StreamSpec, config: dict[str, Any]) -> list[Finding]:
    """Under which policies of this stream waiting data could vanish: field, what it is, what it must be."""
    wrong: list[tuple[str, object, object]] = []
    for field, must in (("storage", "file"), ("retention", spec.retention)):
        if config.get(field) != must:
            wrong.append((field, config.get(field), must))
    if spec.name in _KEEPS_OLD and config.get("discard") != "new":
        wrong.append(("discard", config.get("discard"), "new"))
    wrong += _wrong_age(spec, config.get("max_age", 0))
    if config.get("max_bytes", -1) <= 0:
        wrong.append(("max_bytes", config.get("max_bytes", -1), "a limit in bytes"))
    must_be_off = ("no_ack", "sealed", *_MUST_BE_OFF.get(spec.name, ()))
    must_be_on = (*_MUST_BE_ON.get(spec.name, ()), *(field for field in _READ_BY if spec.options.get(field)))
    wrong += [(field, False, True) for field in must_be_on if not config.get(field)]
    wrong += [(field, True, False) for field in must_be_off if config.get(field)]
    missing = [subject for subject in spec.subjects if subject not in config.get("subjects", ())]
    wrong += [("subjects", config.get("subjects"), f"to include {subject}") for subject in missing]
    wrong += _wrong_count(spec, config.get("max_msgs_per_subject", -1))
    return [Finding("bad_policy", spec.name, f"{field} is {is_!r}; it must be {must!r}") for field, is_, must in wrong]


def check_schedules(spec: StreamSpec, config: dict[str, Any]) -> list[Finding]:
    """What keeps the native driver from working. A server that knows no schedules leaves the field out."""
    if spec.name != topology.SCHEDULES or config.get(topology.SCHEDULES_FLAG):
        return []
    text = (
        f"{topology.SCHEDULES_FLAG} is False; it must be True for --driver native: run `durable-timer provision`, "
        "which turns it on where the server lets it (it needs 2.12 or newer, and discard old); or use --driver heap"
    )
    return [Finding(UNSUPPORTED, spec.name, text)]


def check_account(info: dict[str, Any], present: list[dict[str, Any]], absent: list[dict[str, Any]]) -> list[Finding]:
    """Whether the account can hold what its streams, also those still to be made, are allowed to take together."""
    limit = info.get("limits", {}).get("max_storage", -1)
    ours = _room(present)
    wanted = max(ours, info.get("reserved_storage", 0)) + _room(absent)
    if limit <= 0 or wanted <= limit:
        return []
    text = f"max_storage is {limit}; it must be {wanted} or more, which is what max_bytes of all streams here add up to"
    return [Finding("bad_policy", ACCOUNT, text)]


def _room(configs: list[dict[str, Any]]) -> int:
    """Bytes that these streams may take, with all replicas."""
    return sum(max(config.get("max_bytes", 0), 0) * config.get("num_replicas", 1) for config in configs)


def _wrong_count(spec: StreamSpec, have: int) -> list[tuple[str, object, object]]:
    """A limit on messages of one subject drops the oldest of them, whatever ``discard`` says."""
    want = spec.options.get("max_msgs_per_subject", -1)
    if have == want or (want == -1 and (have <= 0 or spec.name not in _KEEPS_OLD)):
        return []
    return [("max_msgs_per_subject", have, want)]


def _wrong_age(spec: StreamSpec, max_age: int) -> list[tuple[str, object, object]]:
    if spec.name in _NO_AGE and max_age:
        return [("max_age", f"{max_age // topology.NS} s", "0 (never)")]
    if spec.name == topology.TERMINALS and 0 < max_age < spec.max_age:
        return [("max_age", f"{max_age // topology.NS} s", f"{spec.max_age // topology.NS} s or longer")]
    return []


def check_consumer(spec: ConsumerSpec, config: dict[str, Any]) -> list[Finding]:
    """Under which policies of this consumer messages could be lost or starve."""
    must = {"ack_policy": "explicit", "filter_subject": spec.filter_subject, "deliver_policy": "all"}
    wrong: list[tuple[str, object, object]] = [
        (field, config.get(field), value) for field, value in must.items() if config.get(field) != value
    ]
    if config.get("headers_only"):
        wrong.append(("headers_only", True, False))
    if config.get("deliver_subject"):
        wrong.append(("deliver_subject", config["deliver_subject"], "empty (a pull consumer)"))
    if config.get("max_deliver", -1) > 0:
        wrong.append(("max_deliver", config["max_deliver"], -1))
    if config.get("max_ack_pending", -1) > 0:
        wrong.append(("max_ack_pending", config["max_ack_pending"], -1))
    return [
        Finding("bad_policy", f"{spec.stream} > {spec.name}", f"{field} is {is_!r}; it must be {value!r}")
        for field, is_, value in wrong
    ]


def widened(spec: StreamSpec, config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """``config`` with larger limits and missing subjects, and what changed in words."""
    wider, changes = dict(config), []
    for field, want in (("max_bytes", spec.max_bytes), ("max_age", spec.max_age)):
        have = config.get(field, 0)
        if 0 < have < want:
            wider[field] = want
            changes.append(f"{field} {have} -> {want}")
    missing = [subject for subject in spec.subjects if subject not in config["subjects"]]
    if missing:
        narrower = {have for have in config["subjects"] for subject in missing if topology.covers(subject, have)}
        wider["subjects"] = [*(have for have in config["subjects"] if have not in narrower), *missing]
        changes.append(f"subjects + {', '.join(missing)}")
    return wider, changes
