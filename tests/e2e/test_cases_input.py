"""Cases of the field (cases.md) about what is sent, and in which order; each test is named after its case."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.broker import Broker
from tests.support.service import Desk, Engine, Service, encoded, eventually, lineage_key, name_ref, ref_of, unique
from timer_service.jetstream import topology

FAR = {"delay_ms": 86_400_000}
START = "durable_timer.commands.start.v1"


# -- C18: the answer before the question ------------------------------------------------------------------------


async def test_c18_answers_before_the_start(desk: Desk) -> None:
    """C18: complete, fail and retry of a timer whose start is still to come are refused at once, and harm it not."""
    key = {"name": unique()}
    named = {"timer_ref": ref_of(key), "generation": 0, "fence": 2}
    for kind, more in (("complete", {}), ("fail", {"failure_code": "no"}), ("retry", {"due": {"delay_ms": 1}})):
        outcome = await desk.ask(kind, within=20, **named, **more)
        assert (outcome["status"], outcome["code"], outcome["phase"]) == ("rejected", "unknown_timer", None)
    async with Engine(desk) as engine:
        assert (await desk.ask("start", timer=key, due={"delay_ms": 50}))["generation"] == 0
        resume = await engine.resume_of(ref_of(key))
        assert (await engine.reply(resume, "complete"))["status"] == "accepted"


async def test_c18_a_cancel_before_its_start(desk: Desk) -> None:
    """C18: one that names the generation cancels it, so that it never fires; one that names none is superseded."""
    named, plain = {"name": unique()}, {"name": unique()}
    async with Engine(desk) as engine:
        cancels = [
            await desk.asked("durable_timer.commands.cancel.v1", encoded({"timer_ref": ref_of(key), **more}))
            for key, more in ((named, {"generation": 0}), (plain, {}))
        ]
        starts = [await desk.asked(START, encoded({"timer": key, "due": {"delay_ms": 500}})) for key in (named, plain)]
        assert [(await one.outcome())["status"] for one in starts] == ["accepted", "accepted"]
        outcomes = [await one.outcome() for one in cancels]
        assert [(one["status"], one["code"]) for one in outcomes] == [("accepted", None), ("accepted", "superseded")]
        assert (await desk.ended(ref_of(named)))["status"] == "cancelled"
        resume = await engine.resume_of(ref_of(plain))
        assert engine.of(ref_of(named)) == []
        assert all(one.queue.empty() for one in (*cancels, *starts)), "something was settled twice"
        await engine.reply(resume, "complete")
    await eventually(lambda: _settled(desk), what="nothing to be delivered again")


async def test_c18_a_cancel_without_a_start_ends(desk: Desk) -> None:
    """C18: after its wait it is refused for good: bounded redelivery."""
    asked = await desk.asked(
        "durable_timer.commands.cancel.v1", encoded({"timer_ref": name_ref(unique()), "wait_ms": 1_000})
    )
    outcome = await asked.outcome()
    assert (outcome["status"], outcome["code"]) == ("rejected", "unknown_timer")
    await eventually(lambda: _settled(desk))
    assert asked.queue.empty()


async def test_c18_a_retry_for_generation_3_before_that_for_2(desk: Desk) -> None:
    """C18: each retry counts for its own generation, in whichever order they come; what is ahead is stale."""
    key = lineage_key()
    async with Engine(desk) as engine:
        await desk.ask("start", timer=key, due={"delay_ms": 20}, max_retries=None)
        for generation in range(2):
            await engine.reply(await engine.resume_of(ref_of(key), generation), "retry", due={"delay_ms": 20})
        resume = await engine.resume_of(ref_of(key), 2)
        ahead = {"timer_ref": ref_of(key), "generation": 3, "fence": resume["fence"] + 2}
        assert (await desk.ask("retry", **ahead))["code"] == "stale_generation"
        state = await desk.state(ref_of(key))
        assert state is not None
        assert (state["phase"], state["generation"]) == ("elapsed", 2)
        assert (await engine.reply(resume, "retry", due={"delay_ms": 20}))["generation"] == 3
        assert (await engine.reply(resume, "retry", due={"delay_ms": 20}))["code"] == "stale_generation"
        last = await engine.resume_of(ref_of(key), 3)
        assert last["fence"] == ahead["fence"]
        await engine.reply(last, "complete")
        record = await desk.ended(ref_of(key))
        assert (record["generation"], record["retries_used"]) == (3, 3)
        assert len(engine.of(ref_of(key))) == 4


async def _settled(desk: Desk) -> bool:
    return await desk.count(topology.COMMANDS) == 0


# -- C27: instants and numbers ----------------------------------------------------------------------------------

MOMENT_S = 4_102_444_800  # 2100-01-01T00:00:00Z
DUES: dict[str, tuple[str, str | int]] = {
    "year 9999": ('{"at":"9999-12-31T23:59:59Z"}', "invalid_due"),
    "year 10000": ('{"at":"10000-01-01T00:00:00Z"}', "invalid_due"),
    "year 10000 in ms": ('{"at_ms":253402300800000}', "invalid_due"),
    "the last instant": ('{"at":"2200-01-01T00:00:00Z"}', 7_258_118_400_000),
    "a nanosecond later": ('{"at":"2200-01-01T00:00:00.000000001Z"}', "invalid_due"),
    "in ms": (f'{{"at_ms":{MOMENT_S}000}}', MOMENT_S * 1000),
    "in us": (f'{{"at_ms":{MOMENT_S}000000}}', "invalid_due"),
    "in s is 1970, and due": (f'{{"at_ms":{MOMENT_S}}}', MOMENT_S),
    "2^53+1": ('{"at_ms":9007199254740993}', "invalid_due"),
    "2^63": ('{"at_ms":9223372036854775808}', "invalid_due"),
    "2^63 of delay": ('{"delay_ms":9223372036854775808}', "invalid_due"),
    "2^64 of delay": ('{"delay_ms":18446744073709551617}', "invalid_due"),
    "-9e15": ('{"at_ms":-9000000000000000}', "invalid_due"),
    "-9e15, a double": ('{"at_ms":-9e15}', "malformed"),
    "1e400": ('{"at_ms":1e400}', "malformed"),
    "1e3": ('{"delay_ms":1e3}', "malformed"),
    "NaN": ('{"at_ms":NaN}', "malformed"),
    "Infinity": ('{"delay_ms":Infinity}', "malformed"),
    "true": ('{"delay_ms":true}', "malformed"),
    "text": ('{"delay_ms":"5"}', "malformed"),
    "5000 digits": ('{"at_ms":' + "9" * 5_000 + "}", "malformed"),
}


@pytest.mark.parametrize("case", DUES)
async def test_c27_instants_and_numbers(desk: Desk, case: str) -> None:
    """C27: refused with the code, or taken by the stated rule and kept exactly; nothing fires by overflow."""
    due, expected = DUES[case]
    key = {"name": unique()}
    body = f'{{"v":1,"command_id":"c","timer":{json.dumps(key)},"due":{due}}}'.encode()
    async with Engine(desk) as engine:
        outcome = await desk.ask_raw(START, body)
        if isinstance(expected, str):
            assert (outcome["status"], outcome["code"]) == ("rejected", expected)
            assert await desk.entry(ref_of(key)) is None
            return
        assert (outcome["status"], outcome["due_at_ms"]) == ("accepted", expected)
        state = await desk.state(ref_of(key))
        assert state is not None
        assert state["due_at_ms"] == expected
        if expected < 4_102_444_800_000:
            assert (await engine.resume_of(ref_of(key)))["due_at_ms"] == expected
            return
        assert state["phase"] == "waiting"
    assert (await desk.ask("cancel", timer_ref=ref_of(key)))["code"] is None


async def test_c27_numbers_in_a_payload_come_back_exactly(desk: Desk) -> None:
    """C27: integers beyond 2^53 and 2^64, the smallest and largest doubles: handed back digit for digit."""
    payload = "[9007199254740993,9223372036854775808,-18446744073709551617,1.7976931348623157e308,5e-324,-9e15,1.0]"
    key = {"name": unique()}
    body = f'{{"v":1,"command_id":"c","timer":{json.dumps(key)},"due":{{"delay_ms":1}},"payload":{payload}}}'
    async with Engine(desk) as engine:
        await desk.ask_raw(START, body.encode())
        await engine.resume_of(ref_of(key))
        assert f'"payload":{payload}'.encode() in engine.of(ref_of(key))[0].data


# -- C43: retries -----------------------------------------------------------------------------------------------


async def test_c43_a_retry_beyond_the_budget_ends_it(desk: Desk) -> None:
    """C43: the retry that is one too many ends the timer as failed, also when its due time is in the past."""
    for due in ({"delay_ms": 10}, {"at_ms": 1}, None):
        key = {"name": unique()}
        async with Engine(desk) as engine:
            await desk.ask("start", timer=key, due={"delay_ms": 20}, max_retries=1)
            for generation in range(2):
                await engine.reply(await engine.resume_of(ref_of(key), generation), "retry", due=due)
            record = await desk.ended(ref_of(key))
            assert (record["status"], record["failure_code"]) == ("failed", "max_retries_exceeded")
            assert len(engine.of(ref_of(key))) == 2


async def test_c43_a_retry_into_the_past_fires_once_at_once(desk: Desk) -> None:
    """C43: the next generation is due at once, fires once, and waits for its own answer: no loop."""
    key = {"name": unique()}
    async with Engine(desk) as engine:
        await desk.ask("start", timer=key, due={"delay_ms": 20}, max_retries=None)
        resume = await engine.resume_of(ref_of(key))
        outcome = await engine.reply(resume, "retry", due={"at": "2001-09-09T01:46:40Z"})
        assert (outcome["generation"], outcome["due_at_ms"]) == (1, 1_000_000_000_000)
        again = await engine.resume_of(ref_of(key), 1)
        before = await desk.last_seq(topology.STATE_STREAM)
        await asyncio.sleep(1.0)  # a loop would turn many times
        assert await desk.last_seq(topology.STATE_STREAM) == before
        assert len(engine.of(ref_of(key))) == 2
        await engine.reply(again, "complete")


# -- C42: what fits as a command and not as a resume ------------------------------------------------------------

MAX_PAYLOAD = 48 * 1024


@pytest.fixture
async def narrow(tmp_path: Path) -> AsyncIterator[tuple[Desk, Service]]:
    """A broker that takes 48 KiB a message, with a service that keeps payloads of up to 40,000 bytes in the state."""
    config = f"max_payload: {MAX_PAYLOAD}"
    with (
        Broker(tmp_path / "nats", extra_config=config) as broker,
        Service(broker.url, tmp_path, inline_payload_max_bytes=40_000, request_timeout_ms=1_000) as running,
    ):
        await running.ready()
        async with Desk.at(broker.url) as desk:
            yield desk, running


async def test_c42_a_start_whose_resume_would_not_fit(narrow: tuple[Desk, Service]) -> None:
    """C42: refused at admission, counted in bytes; a smaller one goes all the way; nothing fails over and over."""
    desk, service = narrow
    for text in ("x" * 48_700, "é" * 24_350, "x" * 39_000):
        name = unique()
        outcome = await desk.ask_raw(START, _start_in_bytes(name, text))
        assert (outcome["status"], outcome["code"]) == ("rejected", "too_large")
        assert await desk.entry(name_ref(name)) is None
    async with Engine(desk) as engine:
        for text in ("x" * 45_000, "é" * 16_000):  # the first beside the state, the second in it
            name = unique()
            assert (await desk.ask_raw(START, _start_in_bytes(name, text)))["status"] == "accepted"
            for generation in range(16):
                resume = await engine.resume_of(name_ref(name), generation)
                assert resume["payload"] == text
                await desk.ask(
                    "retry", **_named(resume), command_id='"' * 126 + f"{generation:02}", due={"delay_ms": 1}
                )
            resume = await engine.resume_of(name_ref(name), 16)
            await desk.ask("complete", **_named(resume))
            assert (await desk.ended(name_ref(name)))["status"] == "completed"
    assert not service.events("wake.failed")


def _start_in_bytes(name: str, text: str) -> bytes:
    fields = {"v": 1, "command_id": "c", "timer": {"name": name}, "due": {"delay_ms": 50}, "max_retries": 20,
              "payload": text}  # fmt: skip
    return json.dumps(fields, ensure_ascii=False).encode()


async def test_c42_texts_that_grow_are_settled(narrow: tuple[Desk, Service]) -> None:
    """C42: a message of control characters, six times as long in a record, is refused where that does not fit."""
    desk, _ = narrow
    name = unique()
    async with Engine(desk) as engine:
        assert (await desk.ask_raw(START, _start_in_bytes(name, "x" * 37_500)))["status"] == "accepted"
        for generation in range(15):
            resume = await engine.resume_of(name_ref(name), generation)
            await desk.ask("retry", **_named(resume), command_id="\\" * 126 + f"{generation:02}", due={"delay_ms": 1})
        resume = await engine.resume_of(name_ref(name), 15)
        outcome = await desk.ask("fail", **_named(resume), failure_code="no", message="\1" * 1_024)
        assert (outcome["status"], outcome["code"], outcome["phase"]) == ("rejected", "too_large", "elapsed")
        assert (await desk.ask("fail", **_named(resume), failure_code="no"))["status"] == "accepted"
        assert (await desk.ended(name_ref(name)))["failure_code"] == "no"
    await eventually(lambda: _settled(desk))


async def test_c42_a_refusal_that_does_not_fit_is_cut(tmp_path: Path) -> None:
    """C42: the record of a refused body that grows as text is cut until the broker takes it."""
    with (
        Broker(tmp_path / "nats", extra_config="max_payload: 16KB") as broker,
        Service(broker.url, tmp_path) as running,
    ):
        await running.ready()
        async with Desk.at(broker.url) as desk:
            outcome = await desk.ask_raw(START, b'{"v":1,"x":"' + b"\x01" * 6_000 + b'"}')
            assert (outcome["status"], outcome["code"]) == ("rejected", "malformed")
            (record,) = await desk.rejections()
            assert record["body_truncated"] is True
            assert record["body"].startswith('{"v":1,"x":"\1')
            await eventually(lambda: _settled(desk))


def _named(resume: dict[str, Any]) -> dict[str, Any]:
    return {name: resume[name] for name in ("timer_ref", "generation", "fence")}
