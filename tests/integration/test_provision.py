"""Provisioning against a real broker: what it makes, what it widens, what it never touches, and what it finds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.support.broker import Broker
from tests.support.guarded import GuardedBroker
from tests.support.service import eventually
from timer_service.errors import BrokerError, Forbidden, RequestRefused
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.permissions import missing_permissions
from timer_service.jetstream.provision import STORE_FAILED, Finding, Provisioner, check_consumer, check_stream
from timer_service.jetstream.publish import Publisher
from timer_service.jetstream.topology import CONSUMERS, NS, ConsumerSpec, Sizes, StreamSpec

SIZES = Sizes()
STREAMS = {spec.name: spec for spec in topology.streams(SIZES)}
STATE, SNAPSHOTS, COMMANDS = topology.STATE_STREAM, topology.SNAPSHOTS, topology.COMMANDS
RESUMES, SCHEDULES, TERMINALS = topology.RESUMES, topology.SCHEDULES, topology.TERMINALS


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedBroker]:
    """A broker for this module alone: each test finds it empty."""
    with GuardedBroker(tmp_path_factory.mktemp("provision") / "nats") as running:
        yield running


@pytest.fixture
async def connection(empty: GuardedBroker) -> AsyncIterator[Connection]:
    opened = Connection(empty.admin_url, name="test")
    await opened.open()
    for name in (await opened.api("STREAM.NAMES")).get("streams") or []:
        await opened.api(f"STREAM.DELETE.{name}")
    yield opened
    await opened.close()


@pytest.fixture
def provisioner(connection: Connection) -> Provisioner:
    return Provisioner(connection, SIZES)


async def configs(connection: Connection) -> dict[str, dict[str, Any]]:
    """Every stream's and consumer's configuration, as the broker tells it."""
    found = {}
    for name in (await connection.api("STREAM.NAMES")).get("streams") or []:
        found[name] = (await connection.api(f"STREAM.INFO.{name}"))["config"]
        for consumer in (await connection.api(f"CONSUMER.NAMES.{name}")).get("consumers") or []:
            found[consumer] = (await connection.api(f"CONSUMER.INFO.{name}.{consumer}"))["config"]
    return found


async def make_stream(connection: Connection, spec: StreamSpec, **other: Any) -> None:
    await Provisioner(connection, SIZES)._call(f"STREAM.CREATE.{spec.name}", {**spec.config(1), **other}, spec.name)


async def test_a_store_that_can_not_be_made_yet_is_made_again(
    connection: Connection, provisioner: Provisioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker may still be removing one of that name; when it never can, that is told."""
    real, refusals = connection.api, [RequestRefused("error creating store", STORE_FAILED)] * 2

    async def api(name: str, body: object = None) -> dict[str, Any]:
        if refusals and name.startswith("STREAM.CREATE."):
            raise refusals.pop()
        return await real(name, body)

    monkeypatch.setattr(provisioner, "_api", api)
    assert f"created stream {STATE}" in await provisioner.provision()
    await connection.api(f"STREAM.DELETE.{SNAPSHOTS}")
    refusals.extend([RequestRefused("error creating store", STORE_FAILED)] * 10)
    with pytest.raises(BrokerError, match=f"{SNAPSHOTS}: error creating store"):
        await provisioner.provision()


# -- what it makes and widens -----------------------------------------------------------------------------------


async def test_everything_is_made_once(connection: Connection, provisioner: Provisioner) -> None:
    """On an empty broker all that the contract names is created; repeating it does nothing and nothing is found."""
    done = await provisioner.provision()
    assert set(done) == {
        *(f"created stream {name}" for name in STREAMS),
        *(f"created consumer {spec.name}" for spec in CONSUMERS),
    }
    before = await configs(connection)
    assert await provisioner.provision() == []
    assert await provisioner.create_missing() == []
    assert await provisioner.check() == []
    assert await missing_permissions(connection) == []
    assert await configs(connection) == before


async def test_only_what_is_missing_is_made(connection: Connection, provisioner: Provisioner) -> None:
    """A deleted stream and a deleted consumer come back; the others keep their messages."""
    await provisioner.provision()
    await connection.request(topology.terminal_subject("kept"), b"{}")
    await connection.api(f"STREAM.DELETE.{SNAPSHOTS}")
    await connection.api(f"CONSUMER.DELETE.{RESUMES}.{topology.RESUME_CONSUMER}")
    missing = {(finding.code, finding.resource) for finding in await provisioner.check()}
    assert missing == {("missing", SNAPSHOTS), ("missing", f"{RESUMES} > {topology.RESUME_CONSUMER}")}
    assert sorted(await provisioner.provision()) == [
        f"created consumer {topology.RESUME_CONSUMER}", f"created stream {SNAPSHOTS}",
    ]  # fmt: skip
    assert (await connection.api(f"STREAM.INFO.{TERMINALS}"))["state"]["messages"] == 1


async def test_limits_and_subjects_are_widened_and_messages_stay(connection: Connection) -> None:
    """Smaller limits, a shorter archive and a missing subject are widened; what is stored is still there."""
    small = replace(SIZES, state_bytes=2**20, terminals_bytes=2**20, archive_max_age_s=3600)
    await Provisioner(connection, small).provision()
    fewer = (await connection.api(f"STREAM.INFO.{SCHEDULES}"))["config"] | {"subjects": [topology.WAKE_FILTER]}
    await connection.api(f"STREAM.UPDATE.{SCHEDULES}", fewer)
    await connection.request(topology.state_subject("kept"), b"{}")
    await connection.request(topology.terminal_subject("kept"), b"{}")
    done = await Provisioner(connection, SIZES).provision()
    assert sorted(done) == sorted([
        f"widened stream {STATE}: max_bytes {2**20} -> {2**30}",
        f"widened stream {TERMINALS}: max_bytes {2**20} -> {2**31}, max_age {3600 * NS} -> {90 * 86_400 * NS}",
        f"widened stream {SCHEDULES}: subjects + {topology.SCHEDULE_FILTER}",
    ])  # fmt: skip
    assert await Provisioner(connection, SIZES).check() == []
    for stream in (STATE, TERMINALS):
        assert (await connection.api(f"STREAM.INFO.{stream}"))["state"]["messages"] == 1


async def test_a_narrower_subject_gives_way_to_the_one_that_covers_it(
    connection: Connection, provisioner: Provisioner
) -> None:
    """A stream that takes only some of its messages is widened in place; the broker refuses subjects that overlap."""
    await provisioner.provision()
    starts = [topology.command_subject("start"), topology.command_subject("cancel")]
    fewer = (await connection.api(f"STREAM.INFO.{topology.COMMANDS}"))["config"] | {"subjects": starts}
    await connection.api(f"STREAM.UPDATE.{topology.COMMANDS}", fewer)
    assert [finding.code for finding in await provisioner.check()] == ["bad_policy"]
    await provisioner.provision()
    now = (await connection.api(f"STREAM.INFO.{topology.COMMANDS}"))["config"]
    assert now["subjects"] == ["durable_timer.commands.>"]
    assert await provisioner.check() == []


@pytest.mark.parametrize(
    ("subject", "other", "covered"),
    [
        ("a.>", "a.b", True), ("a.>", "a.b.c", True), ("a.>", "a.>", True), ("a.>", "a.*", True),
        ("a.>", "a", False), ("a.>", "b.c", False), ("a.>", ">", False), ("a.b", "a.b", True), ("a.b", "a.*", False),
        ("a.b", "a.b.c", False), ("a.*", "a.b", True), ("a.*", "a.>", False), ("a.*", "a.b.c", False), (">", "a", True),
    ],
)  # fmt: skip
def test_what_a_subject_covers(subject: str, other: str, covered: bool) -> None:
    """Wildcards as the broker reads them."""
    assert topology.covers(subject, other) is covered


async def test_nothing_is_ever_narrowed(connection: Connection, provisioner: Provisioner) -> None:
    """Smaller settings than what is there, and an archive that is kept for ever, change nothing."""
    await provisioner.provision()
    kept = (await connection.api(f"STREAM.INFO.{TERMINALS}"))["config"] | {"max_age": 0}
    await connection.api(f"STREAM.UPDATE.{TERMINALS}", kept)
    before = await configs(connection)
    small = Sizes(1, 2**20, 2**20, 2**20, 2**20, 2**20, 60)
    assert await Provisioner(connection, small).provision() == []
    assert await configs(connection) == before
    assert await Provisioner(connection, small).check() == []


@pytest.mark.parametrize(
    ("name", "other"),
    [
        *((name, {"storage": "memory"}) for name in STREAMS),
        *((name, {"retention": "interest"}) for name in STREAMS),
        *((name, {"retention": "limits"}) for name in (COMMANDS, RESUMES)),
        *((name, {"discard": "old"}) for name in (STATE, SNAPSHOTS, COMMANDS, RESUMES, TERMINALS)),
        *((name, {"max_age": 3600 * NS}) for name in (STATE, SNAPSHOTS, COMMANDS, RESUMES)),
        *((name, {"no_ack": True}) for name in STREAMS),
        *((name, {"max_bytes": -1}) for name in STREAMS),
        *((name, {field: True}) for name in (COMMANDS, RESUMES) for field in ("allow_msg_ttl", "allow_rollup_hdrs")),
        *((name, {"allow_direct": False}) for name in (STATE, SNAPSHOTS, TERMINALS, RESUMES)),
        *((name, {"max_msgs_per_subject": 3}) for name in (STATE, SNAPSHOTS, COMMANDS, RESUMES, TERMINALS)),
        (STATE, {"allow_msg_ttl": False}),
        (SCHEDULES, {"allow_msg_ttl": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)  # fmt: skip
async def test_a_dangerous_policy_is_named_and_left_alone(
    connection: Connection, provisioner: Provisioner, name: str, other: dict[str, Any]
) -> None:
    """Resource, field, what it is and what it must be; provisioning neither empties nor changes the stream."""
    spec = STREAMS[name]
    await make_stream(connection, spec, **other)
    if "no_ack" not in other:
        await connection.request(spec.subjects[0].replace(">", "x"), b"{}")
    before = await connection.api(f"STREAM.INFO.{name}")
    await provisioner.provision()
    after = await connection.api(f"STREAM.INFO.{name}")
    assert after["config"] == before["config"]
    assert after["state"]["last_seq"] == before["state"]["last_seq"]
    (finding,) = [finding for finding in await provisioner.check() if finding.code != "missing"]
    assert (finding.code, finding.resource) == ("bad_policy", name)
    ((field, value),) = other.items()
    is_, must = {
        "max_age": ("'3600 s'", "'0 (never)'"),
        "max_bytes": ("-1", "'a limit in bytes'"),
        "retention": (repr(value), repr(spec.retention)),
        "storage": ("'memory'", "'file'"),
        "discard": ("'old'", "'new'"),
        "max_msgs_per_subject": ("3", "1" if name == STATE else "-1"),
    }.get(field, (repr(value), repr(not value)))
    assert finding.message == f"{field} is {is_}; it must be {must}"


async def test_an_archive_that_forgets_too_early_is_named(connection: Connection) -> None:
    """An age below the setting is wrong (and what provisioning mends); one above it, or none, is not."""
    for age_s, wrong in ((3_599, True), (3_600, False), (7_200, False), (0, False)):
        sizes = replace(SIZES, archive_max_age_s=3_600)
        await Provisioner(connection, sizes).provision()
        config = (await connection.api(f"STREAM.INFO.{TERMINALS}"))["config"] | {"max_age": age_s * NS}
        await connection.api(f"STREAM.UPDATE.{TERMINALS}", config)
        found = await Provisioner(connection, sizes).check()
        assert [finding.message for finding in found] == ["max_age is '3599 s'; it must be '3600 s or longer'"] * wrong


@pytest.mark.parametrize(
    ("spec", "other", "must"),
    [
        (topology.COMMAND_SERVICE, {"max_deliver": 3}, -1),
        (topology.RESUME_SERVICE, {"max_ack_pending": 10}, -1),
        (topology.WAKE_SERVICE, {"ack_policy": "none"}, "explicit"),
        (topology.WAKE_SERVICE, {"ack_policy": "all"}, "explicit"),
        (topology.COMMAND_SERVICE, {"filter_subject": "durable_timer.commands.start.v1"}, topology.COMMAND_FILTER),
        (topology.WAKE_SERVICE, {"deliver_policy": "new"}, "all"),
        (topology.COMMAND_SERVICE, {"headers_only": True}, False),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
async def test_a_dangerous_consumer_is_named_and_left_alone(
    connection: Connection, provisioner: Provisioner, spec: ConsumerSpec, other: dict[str, Any], must: object
) -> None:
    """Consumer, field, what it is and what it must be."""
    await provisioner.provision()
    await connection.api(f"CONSUMER.DELETE.{spec.stream}.{spec.name}")
    body = {"stream_name": spec.stream, "config": spec.config() | other, "action": "create"}
    await connection.api(f"CONSUMER.CREATE.{spec.stream}.{spec.name}.{body['config']['filter_subject']}", body)  # type: ignore[index]
    assert await provisioner.provision() == []
    ((field, value),) = other.items()
    (finding,) = await provisioner.check()
    assert finding == Finding(
        "bad_policy", f"{spec.stream} > {spec.name}", f"{field} is {value!r}; it must be {must!r}"
    )


# -- what belongs to others -------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", [topology.COMMAND_FILTER, "durable_timer.commands.start.v1", "durable_timer.>"])
async def test_a_foreign_stream_on_our_subjects_is_named(
    connection: Connection, provisioner: Provisioner, subject: str
) -> None:
    """Who owns (a part of) the subject stands in the finding; provisioning says so too, and deletes nothing."""
    await connection.api("STREAM.CREATE.FOREIGN", {"name": "FOREIGN", "subjects": [subject]})
    with pytest.raises(BrokerError, match=r"DURABLE_TIMER_\w+: .*overlap"):
        await provisioner.provision()
    (finding,) = [finding for finding in await provisioner.check() if finding.resource == COMMANDS]
    assert finding.code == "subject_taken"
    assert f"subject {topology.COMMAND_FILTER} belongs to stream FOREIGN; free it there" in finding.message
    assert (await connection.api("STREAM.INFO.FOREIGN"))["config"]["subjects"] == [subject]
    await connection.api("STREAM.DELETE.FOREIGN")
    await provisioner.provision()
    assert await provisioner.check() == []


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(topology.SCHEDULE_FILTER, topology.WAKE_FILTER), (topology.WAKE_FILTER, topology.SCHEDULE_FILTER)],
)
async def test_a_foreign_stream_on_one_of_two_subjects_is_named(
    connection: Connection, provisioner: Provisioner, ours: str, theirs: str
) -> None:
    """Our stream is there, and lacks a subject since another stream has it."""
    await make_stream(connection, STREAMS[SCHEDULES], subjects=[ours])
    await connection.api("STREAM.CREATE.FOREIGN", {"name": "FOREIGN", "subjects": [theirs]})
    (finding,) = [finding for finding in await provisioner.check() if finding.resource == SCHEDULES]
    assert finding.code == "subject_taken"
    assert f"subject {theirs} belongs to stream FOREIGN" in finding.message


async def test_an_account_that_is_too_small_is_named(empty: GuardedBroker, connection: Connection) -> None:
    """With and without the streams; what others have reserved there counts, and more room mends it."""
    await connection.api("STREAM.CREATE.OTHER", {"name": "OTHER", "subjects": ["other"], "max_bytes": 2**30})
    empty.allow(max_file="7GB")
    provisioner = Provisioner(connection, SIZES)
    try:
        room = sum(spec.max_bytes for spec in STREAMS.values()) + 2**30
        text = f"max_storage is {7 * 2**30}; it must be {room} or more, which is what max_bytes of all streams here add"
        assert [found.message[: len(text)] for found in await provisioner.check() if found.code != "missing"] == [text]
        with pytest.raises(BrokerError, match=f"{COMMANDS}: "):
            await provisioner.provision()
        empty.allow()
        await provisioner.provision()
        empty.allow(max_file="7GB")
        (finding,) = await provisioner.check()
        assert (finding.code, finding.resource) == ("bad_policy", "account")
        assert finding.message.startswith(text)
    finally:
        empty.allow()
    assert await provisioner.check() == []


# -- permissions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deny", "resource"),
    [
        ("$KV.DURABLE_TIMER_STATE.>", STATE),
        ("durable_timer.snapshot.v1.>", SNAPSHOTS),
        ("durable_timer.terminal.v1.>", TERMINALS),
        ("durable_timer.wake.v1.>", SCHEDULES),
        ("triggers.v2.durable_timer.resume.v1", RESUMES),
        ("durable_timer.rejected.v1.>", topology.REJECTIONS),
        (f"$JS.API.CONSUMER.MSG.NEXT.{COMMANDS}.{topology.COMMAND_CONSUMER}", COMMANDS),
        (f"$JS.API.CONSUMER.MSG.NEXT.{SCHEDULES}.{topology.WAKE_CONSUMER}", SCHEDULES),
        (f"$JS.ACK.{COMMANDS}.{topology.COMMAND_CONSUMER}.>", COMMANDS),
        (f"$JS.ACK.{SCHEDULES}.{topology.WAKE_CONSUMER}.>", SCHEDULES),
        (f"$JS.API.CONSUMER.CREATE.{STATE}.>", STATE),
        (f"$JS.API.DIRECT.GET.{STATE}.$KV.DURABLE_TIMER_STATE.>", STATE),
        (f"$JS.API.DIRECT.GET.{SNAPSHOTS}", SNAPSHOTS),
        (f"$JS.API.STREAM.MSG.DELETE.{SNAPSHOTS}", SNAPSHOTS),
        (f"$JS.API.STREAM.MSG.DELETE.{RESUMES}", RESUMES),
        (f"$JS.API.STREAM.INFO.{RESUMES}", RESUMES),
        ("$JS.API.INFO", "account"),
    ],
)
async def test_a_missing_permission_is_named_at_once_and_its_return_noticed(
    empty: GuardedBroker, connection: Connection, provisioner: Provisioner, deny: str, resource: str
) -> None:
    """The subject as it is to be granted, the stream it is about, without waiting for a time-out; nothing is stored."""
    await provisioner.provision()
    limited = Connection(empty.service_url, name="limited")
    await limited.open()
    try:
        empty.allow(deny=[deny])

        async def found() -> list[Finding]:
            async with asyncio.timeout(10):
                return [*await missing_permissions(limited), *await Provisioner(limited, SIZES).check()]

        # The server may cut the connection when it reads its configuration anew: then the next look tells.
        assert await eventually(found) == [
            Finding("permission_denied", resource, f"no permission to publish on {deny}; grant it to this account")
        ]
        empty.allow()

        async def nothing_found() -> bool:
            return await found() == []

        await eventually(nothing_found)
    finally:
        empty.allow()
        await limited.close()
    for name in STREAMS:
        assert (await connection.api(f"STREAM.INFO.{name}"))["state"]["last_seq"] == 0


async def test_who_may_not_publish_is_told_at_once(
    empty: GuardedBroker, connection: Connection, provisioner: Provisioner
) -> None:
    """A write that is refused fails as forbidden, long before its time-out; one beside it is stored."""
    await provisioner.provision()
    limited = Connection(empty.service_url, name="limited", timeout_ms=20_000)
    await limited.open()
    publisher = Publisher(limited)
    await publisher.start()
    try:
        empty.allow(deny=["$KV.>"])
        async with asyncio.timeout(10):
            with pytest.raises(Forbidden, match=r"publish on \$KV\.DURABLE_TIMER_STATE\.>"):
                await publisher.publish(topology.state_subject("x"), b"{}")
            assert (await publisher.publish(topology.terminal_subject("x"), b"{}")).seq == 1
    finally:
        empty.allow()
        await publisher.stop()
        await limited.close()


async def test_a_subscription_that_was_refused_is_heard_again(
    empty: GuardedBroker, connection: Connection, provisioner: Provisioner
) -> None:
    """Who may not hear something is told so; as soon as it may, it does, without a new connection."""
    await provisioner.provision()
    limited = Connection(empty.service_url, name="limited")
    await limited.open()
    heard = asyncio.Event()

    async def hear(_: Any) -> None:
        heard.set()

    try:
        await limited.subscribe(topology.STATE_FILTER, hear)
        empty.allow(deaf_to=["$KV.>"])
        (finding,) = await missing_permissions(limited)
        assert finding == Finding(
            "permission_denied", STATE, f"no permission to subscribe to {topology.STATE_FILTER}; "
            "grant it to this account",
        )  # fmt: skip
        empty.allow()
        assert await missing_permissions(limited) == []
        await connection.request(topology.state_subject("x"), b"{}")
        async with asyncio.timeout(10):
            await heard.wait()
    finally:
        empty.allow()
        await limited.close()


async def test_a_silent_broker_is_no_missing_permission(broker: Broker) -> None:
    """Without an answer nothing is said about permissions: that would send people the wrong way."""
    opened = Connection(broker.url, name="test", timeout_ms=300)
    await opened.open()
    with broker.paused(), pytest.raises(BrokerError, match=r"does not answer within 0\.3 s"):
        await missing_permissions(opened)
    await opened.close()


async def test_an_account_without_jetstream_is_told(broker: Broker, tmp_path: Any) -> None:
    """A server without JetStream is no puzzle: the message says what to look at."""
    with Broker(tmp_path / "bare", extra_config="accounts: {N: {users: [{user: n, password: n}]}}") as bare:
        opened = Connection(bare.url.replace("//", "//n:n@"), name="test", timeout_ms=5_000)
        await opened.open()
        with pytest.raises(BrokerError, match=r"(?i)jetstream"):
            await Provisioner(opened, SIZES).check()
        await opened.close()


# -- what no server that can be had here does -------------------------------------------------------------------


class _OldServer:
    """A connection to a server of another version, on which nothing else is wrong."""

    def __init__(self, connection: Connection, version: str) -> None:
        self.api = connection.api
        self.server_version = version


@pytest.mark.parametrize(("version", "old"), [("2.11.9", True), ("2.9.25", True), ("2.12.0", False), ("3.0.0", False)])
async def test_a_server_that_is_too_old_is_named(
    connection: Connection, provisioner: Provisioner, version: str, old: bool
) -> None:
    """With the version that it has and the one that it must have."""
    await provisioner.provision()
    found = await Provisioner(cast(Connection, _OldServer(connection, version)), SIZES).check()
    wanted = Finding("server_too_old", "nats-server", f"version is {version}; it must be 2.12.0 or newer")
    assert found == ([wanted] if old else [])


def test_fields_that_a_server_does_not_know_count_as_off() -> None:
    """An older server leaves out what it has no idea of: message TTL that it can't do is told as such."""
    spec = STREAMS[SCHEDULES]
    config = spec.config(1)
    del config["allow_msg_ttl"]
    (finding,) = check_stream(spec, config)
    assert finding.message == "allow_msg_ttl is False; it must be True"
    assert check_stream(spec, {**spec.config(1), "sealed": True})[0].message == "sealed is True; it must be False"
    push = {**topology.WAKE_SERVICE.config(), "deliver_subject": "x"}
    assert "deliver_subject is 'x'" in check_consumer(topology.WAKE_SERVICE, push)[0].message
