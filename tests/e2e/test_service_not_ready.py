"""Not ready: why, in words that lead to the mend; alive all the while; and ready again by itself."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from nats.js.errors import BadRequestError

from tests.support import service as service_module
from tests.support.broker import Broker
from tests.support.cli import Cli
from tests.support.cpu import rests
from tests.support.guarded import GuardedBroker
from tests.support.service import Desk, Engine, Service, complete, eventually, name_ref, unique
from timer_service.jetstream import topology
from timer_service.jetstream.topology import NS, Sizes

SETTINGS: dict[str, object] = {"policy_check_interval_ms": 500, "request_timeout_ms": 1_000}
STREAMS = {spec.name: spec for spec in topology.streams(Sizes())}
NOTICED_S = 30.0
IDLE_SHARE = 0.15


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[GuardedBroker]:
    with GuardedBroker(tmp_path / "nats") as running:
        assert isinstance(running, GuardedBroker)
        yield running


async def reasons(service: Service, code: str, count: int = 1) -> dict[str, str]:
    """Wait for so many reasons of a code, and return what they say by resource; the process is alive meanwhile."""

    def look() -> dict[str, str]:
        status, body = service.readyz()
        found = {reason["resource"]: reason["message"] for reason in body.get("reasons", ()) if reason["code"] == code}
        return found if status == 503 and len(found) >= count else {}

    found = dict(await eventually(look, NOTICED_S, what=f"{count} x {code}"))
    assert service.http("/healthz")[0] == 200
    return found


def doctor(url: str, code: str) -> dict[str, str]:
    """What ``doctor`` says under a code, by resource; it must have ended with 1, and with a hint where it can."""
    answer = Cli(url).json("doctor", code=1)
    assert answer["ok"] is False
    found = {check["resource"]: check for check in answer["checks"] if check["code"] == code}
    assert all(check["hint"] or "durable-timer provision" in check["message"] for check in found.values()), found
    return {resource: check["message"] for resource, check in found.items()}


async def fires(desk: Desk) -> None:
    """The whole ring works: a timer starts, fires and ends, once."""
    async with Engine(desk, complete) as engine:
        name = unique()
        await desk.ask("start", timer={"name": name}, due={"delay_ms": 50}, payload="x" * 2_000, within=NOTICED_S)
        assert (await desk.ended(name_ref(name), NOTICED_S))["status"] == "completed"
        assert len({received.resume_id for received in engine.of(name_ref(name))}) == 1


# -- C40 --------------------------------------------------------------------------------------------------------


async def test_waiting_for_a_broker_is_cheap_and_ends_when_it_comes(broker: Broker, tmp_path: Path) -> None:
    """C40: the broker absent: alive, not ready with the address, no busy loop, ready within seconds of its coming."""
    broker.stop()
    with Service(broker.url, tmp_path, **SETTINGS) as service:
        assert list(await reasons(service, "broker_unreachable")) == [broker.url]
        await rests(service.pid, IDLE_SHARE)
        broker.start()
        await service.ready()


async def test_a_foreign_stream_on_our_subjects(broker: Broker, tmp_path: Path) -> None:
    """C40: not ready, the owner is named, tried again without a busy loop; ready when the subject is free."""
    async with Desk.at(broker.url) as desk:
        await desk.js.add_stream(name="FOREIGN", subjects=["durable_timer.commands.>"])
        await desk.js.publish("durable_timer.commands.start.v1", b"theirs")
        with Service(broker.url, tmp_path, **SETTINGS) as service:
            text = "subject durable_timer.commands.> belongs to stream FOREIGN"
            assert text in (await reasons(service, "subject_taken"))[topology.COMMANDS]
            assert f"{topology.COMMANDS}: " in (await reasons(service, "provision_failed"))["JetStream"]
            assert text in doctor(broker.url, "subject_taken")[topology.COMMANDS]
            await rests(service.pid, IDLE_SHARE)
            assert await desk.count("FOREIGN") == 1
            await desk.js.delete_stream("FOREIGN")
            await service.ready(NOTICED_S)
            await fires(desk)


async def test_a_subject_that_is_taken_while_it_runs(broker: Broker, tmp_path: Path) -> None:
    """Our stream deleted, a foreign one in its place: named; freed and provisioned by hand, all is well again."""
    async with Desk.at(broker.url) as desk:
        with Service(broker.url, tmp_path, **SETTINGS) as service:
            await service.ready()
            await eventually(partial(_taken, desk), what="a moment in which the service is slower than we are")
            assert topology.REJECTIONS in await reasons(service, "subject_taken")
            await reasons(service, "provision_failed")
            await desk.js.delete_stream("FOREIGN")  # and made at once, before the service can do it itself
            await api(desk, f"STREAM.CREATE.{topology.REJECTIONS}", STREAMS[topology.REJECTIONS].config(1))
            await service.ready(NOTICED_S)


async def _taken(desk: Desk) -> bool:
    """Replace the rejections by a stream of somebody else; False when the service has made them anew before that."""
    await desk.js.delete_stream(topology.REJECTIONS)
    try:
        await desk.js.add_stream(name="FOREIGN", subjects=[f"{topology.REJECTED_PREFIX}>"])
    except BadRequestError:
        return False
    return True


async def test_no_provision_only_reports(broker: Broker, tmp_path: Path) -> None:
    """--no-provision makes nothing: every resource is named as missing, until somebody provisions."""
    with Service(broker.url, tmp_path, "--no-provision", **SETTINGS) as service:
        wanted = {*STREAMS, *(f"{spec.stream} > {spec.name}" for spec in topology.CONSUMERS)}
        found = await reasons(service, "missing", len(wanted))
        assert set(found) == set(doctor(broker.url, "missing")) == wanted
        assert all("durable-timer provision" in message for message in found.values())
        async with Desk.at(broker.url) as desk:
            assert await desk.js.streams_info() == []
            assert Cli(broker.url).run("provision").returncode == 0
            await service.ready(NOTICED_S)
            await fires(desk)
            await desk.js.delete_consumer(topology.COMMANDS, topology.COMMAND_CONSUMER)
            gone = f"{topology.COMMANDS} > {topology.COMMAND_CONSUMER}"
            assert list(await reasons(service, "missing")) == [gone]
            assert Cli(broker.url).run("provision").stdout == f"created consumer {topology.COMMAND_CONSUMER}\n"
            await service.ready(NOTICED_S)
            await fires(desk)


# -- policies ---------------------------------------------------------------------------------------------------

DRIFT: dict[str, dict[str, Any]] = {
    topology.STATE_STREAM: {"allow_msg_ttl": False},
    topology.SNAPSHOTS: {"storage": "memory"},
    topology.COMMANDS: {"allow_rollup_hdrs": True},
    topology.RESUMES: {"max_age": 60 * NS, "duplicate_window": 60 * NS},
    topology.SCHEDULES: {"allow_msg_ttl": False, "allow_msg_schedules": False},
    topology.TERMINALS: {"discard": "old"},
    topology.REJECTIONS: {"no_ack": True},
    topology.LEASE_STREAM: {"max_bytes": -1},
}


async def test_every_dangerous_policy_is_told_by_service_and_doctor_alike(broker: Broker, tmp_path: Path) -> None:
    """All that is wrong at once, each with its field; the service mends nothing; made anew, it is ready by itself."""
    async with Desk.at(broker.url) as desk:
        for name, other in DRIFT.items():
            await api(desk, f"STREAM.CREATE.{name}", STREAMS[name].config(1) | other)
        with Service(broker.url, tmp_path, **SETTINGS) as service:
            found = await reasons(service, "bad_policy", len(DRIFT))
            assert doctor(broker.url, "bad_policy") == found
            for name, other in DRIFT.items():
                assert found[name].startswith(f"{next(iter(other))} is ")
                assert "; it must be " in found[name]
            for name, other in DRIFT.items():
                field = next(iter(other))
                config = (await api(desk, f"STREAM.INFO.{name}"))["config"]
                assert config.get(field, False) == other[field], "drift is for people to mend"
                await desk.js.delete_stream(name)
            await service.ready(NOTICED_S)
            await fires(desk)
            assert Cli(broker.url).json("doctor")["ok"] is True


async def api(desk: Desk, request: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    message = await desk.client.request(f"$JS.API.{request}", json.dumps(body).encode() if body else b"", timeout=20)
    answer: dict[str, Any] = json.loads(message.data)
    assert "error" not in answer, answer
    return answer


# -- permissions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "resource", "subject"),
    [
        (
            {"deny": [f"$JS.API.CONSUMER.MSG.NEXT.{topology.COMMANDS}.>"]},
            topology.COMMANDS,
            f"$JS.API.CONSUMER.MSG.NEXT.{topology.COMMANDS}.{topology.COMMAND_CONSUMER}",
        ),
        ({"deny": ["$KV.>"]}, topology.STATE_STREAM, "$KV.DURABLE_TIMER_STATE.>"),
        ({"deny": [f"{topology.TERMINAL_PREFIX}>"]}, topology.TERMINALS, f"{topology.TERMINAL_PREFIX}>"),
        ({"deny": ["$JS.ACK.>"]}, topology.SCHEDULES, f"$JS.ACK.{topology.SCHEDULES}.{topology.WAKE_CONSUMER}.>"),
        ({"deny": [f"{topology.LEASE_PREFIX}>"]}, topology.LEASE_STREAM, f"{topology.LEASE_PREFIX}>"),
        ({"deaf_to": ["_INBOX.>"]}, "_INBOX.>", "_INBOX.>"),
    ],
    ids=["consume", "state", "archive", "acknowledge", "leases", "replies"],
)
async def test_a_lost_permission_is_named_and_its_return_noticed(
    guarded: GuardedBroker, tmp_path: Path, lost: dict[str, Any], resource: str, subject: str
) -> None:
    """Noticed while it runs, told by doctor in the same words, and what was due meanwhile fires once it is back."""
    with Service(guarded.service_url, tmp_path, **SETTINGS) as service:
        await service.ready()
        async with Desk.at(guarded.admin_url) as desk, Engine(desk, complete) as engine:
            name = unique()
            await desk.ask("start", timer={"name": name}, due={"delay_ms": 1_500})
            guarded.allow(**lost)
            found = await reasons(service, "permission_denied")
            await eventually(lambda: f" {subject};" in reason_of(service, resource), NOTICED_S)
            assert subject in found[resource]
            assert subject in doctor(guarded.service_url, "permission_denied")[resource]
            guarded.allow()
            await service.ready(NOTICED_S)
            assert (await desk.ended(name_ref(name), NOTICED_S))["status"] == "completed"
            assert {received.resume_id for received in engine.of(name_ref(name))} == {f"{name_ref(name)}.0"}
            assert await desk.records_of(name_ref(name)) == 1


def reason_of(service: Service, resource: str) -> str:
    """What /readyz says about a resource now."""
    found = service.readyz()[1].get("reasons", ())
    return " ".join(reason["message"] for reason in found if reason["resource"] == resource)


async def test_an_account_that_shrinks_is_named(guarded: GuardedBroker, tmp_path: Path) -> None:
    """Limits that add up to more than the account has: with both numbers, until it has enough again."""
    with Service(guarded.service_url, tmp_path, **SETTINGS) as service:
        await service.ready()
        guarded.allow(max_file="1GB")
        text = f"max_storage is {2**30}; it must be {sum(spec.max_bytes for spec in STREAMS.values())} or more"
        assert text in (await reasons(service, "bad_policy"))["account"]
        assert text in doctor(guarded.service_url, "bad_policy")["account"]
        guarded.allow()
        await service.ready(NOTICED_S)


# -- the clock --------------------------------------------------------------------------------------------------

WRONG_CLOCK = """\
#!{python}
import sys
from pathlib import Path
from timer_service.cli import main
from timer_service.clock import SystemClock
right = SystemClock.now_ms
SystemClock.now_ms = lambda self: right(self) + int(Path({offset!r}).read_text())
main()
"""


async def _off_by_about(service: Service, offset_ms: int) -> bool:
    told = (await reasons(service, "clock_skew"))["clock"]
    return abs(int(told.split("our clock is ")[1].split(" ms")[0]) - offset_ms) < 400


@pytest.mark.parametrize("offset_ms", [900, -900])
async def test_a_clock_that_is_off_the_brokers(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset_ms: int
) -> None:
    """Fast or slow by more than 250 ms: not ready, with how much; in step again, ready. Doctor says the same."""
    offset, program = tmp_path / "offset", tmp_path / "durable-timer"
    offset.write_text(str(offset_ms))
    program.write_text(WRONG_CLOCK.format(python=sys.executable, offset=str(offset)))
    program.chmod(0o700)
    monkeypatch.setattr(service_module, "CLI", program)
    with Service(broker.url, tmp_path, **SETTINGS) as service:
        await reasons(service, "clock_skew")
        await eventually(partial(_off_by_about, service, offset_ms), NOTICED_S)
        doctor = [str(program), "doctor", "--nats", broker.url, "--json"]
        done = await asyncio.to_thread(lambda: subprocess.run(doctor, capture_output=True, text=True))
        assert done.returncode == 1
        (check,) = [check for check in json.loads(done.stdout)["checks"] if not check["ok"]]
        assert (check["code"], check["resource"]) == ("clock_skew", "clock")
        assert "NTP" in check["hint"]
        offset.with_suffix(".new").write_text("100")
        os.replace(offset.with_suffix(".new"), offset)
        await service.ready(NOTICED_S)
