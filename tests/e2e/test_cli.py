"""The command line against a real service: for machines, for people, and when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.broker import Broker
from tests.support.cli import OUTCOME_FIELDS, Cli, Running
from tests.support.service import name_ref, unique
from tests.support.stage import Stage

NOBODY = "nats://127.0.0.1:9"
BIG = 12345678901234567890123456789


@pytest.fixture
async def cli(stage: Stage) -> Cli:
    await stage.service.ready()
    return Cli(stage.broker.url)


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Cli]:
    """A broker on which nothing was made yet."""
    with Broker(tmp_path / "nats") as broker:
        yield Cli(broker.url)


def elapsed(cli: Cli, *more: str) -> dict[str, Any]:
    """The outcome of a start, when the timer has elapsed, with its present fence."""
    started = cli.json("start", "--name", unique(), "--delay", "1ms", *more)
    record = cli.until(lambda record: record["phase"] == "elapsed", "get", started["timer_ref"])
    return {**started, "fence": record["fence"]}


# -- commands -------------------------------------------------------------------------------------------------


def test_an_accepted_start_prints_the_outcome(cli: Cli) -> None:
    """--json prints exactly the outcome's nine fields in one line, and exits 0."""
    name = unique()
    outcome = cli.json("start", "--name", name, "--delay", "1h30m", "--command-id", "c-1")
    assert list(outcome) == OUTCOME_FIELDS
    assert (outcome["status"], outcome["command_id"], outcome["timer_ref"]) == ("accepted", "c-1", name_ref(name))
    record = cli.json("get", outcome["timer_ref"])
    assert record["due_at_ms"] - record["timeline"][0]["accepted_at_ms"] == 5_400_000


def test_a_repeated_command_is_a_duplicate(cli: Cli) -> None:
    """The same command_id with the same content changes nothing and exits 0."""
    command = ("start", "--name", unique(), "--at", "2199-01-01T00:00:00Z", "--command-id", "same")
    first, second = cli.json(*command), cli.json(*command)
    assert (first["status"], second["status"]) == ("accepted", "duplicate")
    assert first["generation"] == second["generation"] == 0


def test_a_rejection_prints_the_outcome_and_exits_1(cli: Cli) -> None:
    """Rejections are outcomes too: the same line, exit code 1."""
    outcome = cli.json("start", "--name", unique(), "--delay-ms", "0", code=1)
    assert list(outcome) == OUTCOME_FIELDS
    assert (outcome["status"], outcome["code"]) == ("rejected", "invalid_due")
    outcome = cli.json("cancel", "--name", unique(), "--wait-ms", "0", code=1)
    assert outcome["code"] == "unknown_timer"


@pytest.mark.parametrize("source", ["argument", "file", "stdin"])
def test_big_integers_survive_both_ways(cli: Cli, tmp_path: Path, source: str) -> None:
    """A payload goes in by argument, file or standard input, and comes back value for value."""
    payload = f'{{"n": {BIG}, "x": 1.0}}'
    (tmp_path / "payload.json").write_text(payload)
    given = {"argument": payload, "file": f"@{tmp_path / 'payload.json'}", "stdin": "-"}[source]
    started = cli.json("start", "--name", unique(), "--delay", "1h", "--payload", given, stdin=payload)
    printed = cli.run("get", started["timer_ref"], "--json").stdout
    assert f'"payload":{{"n":{BIG},"x":1.0}}' in printed.replace(" ", "")


def test_a_flows_timer_takes_its_four_parts_and_edges(cli: Cli) -> None:
    """A lineage timer is started by its key, and its edges are kept as given."""
    run_id = unique("run")
    parts = ("--flow-id", "f", "--flow-version", "1", "--root-execution-id", run_id, "--node-id", "n")
    started = cli.json("start", *parts, "--delay", "1h", "--edges", '{"start":"a","elapsed":"b"}')
    record = cli.json("get", started["timer_ref"])
    assert record["timer"] == {"flow_id": "f", "flow_version": "1", "root_execution_id": run_id, "node_id": "n"}
    assert record["edges"] == {"start": "a", "elapsed": "b"}
    rejected = cli.json("start", *parts, "--delay", "2h", code=1)
    assert rejected["code"] == "conflict"
    assert cli.json("start", *parts, "--delay", "2h", "--if-exists", "replace")["generation"] == 1


def test_a_resume_is_answered_from_the_command_line(cli: Cli) -> None:
    """retry arms the next generation, complete and fail end it, and each is seen in the record."""
    one = elapsed(cli, "--max-retries", "none")
    retried = cli.json("retry", one["timer_ref"], "0", str(one["fence"]), "--delay", "1ms")
    assert (retried["generation"], retried["status"]) == (1, "accepted")
    again = cli.until(lambda record: record["phase"] == "elapsed", "get", one["timer_ref"])
    stale = cli.json("complete", one["timer_ref"], "0", str(one["fence"]), code=1)
    assert stale["code"] == "stale_generation"
    cli.json("complete", one["timer_ref"], "1", str(again["fence"]))
    record = cli.until(lambda record: "status" in record, "get", one["timer_ref"])
    assert record["status"] == "completed"
    assert [entry["answer"] for entry in record["timeline"]] == ["retry", "complete"]
    other = elapsed(cli)
    cli.json("fail", other["timer_ref"], "0", str(other["fence"]), "no_stock", "--message", "sold out")
    record = cli.until(lambda record: "status" in record, "get", other["timer_ref"])
    assert (record["status"], record["failure_code"], record["message"]) == ("failed", "no_stock", "sold out")


def test_no_wait_returns_when_the_command_is_stored(cli: Cli) -> None:
    """Without waiting there is no status yet, but the command is carried out."""
    name = unique()
    stored = cli.json("start", "--name", name, "--delay", "1h", "--no-wait")
    assert list(stored) == OUTCOME_FIELDS
    assert (stored["status"], stored["timer_ref"]) == (None, name_ref(name))
    cancelled = cli.json("cancel", "--name", name)
    assert (cancelled["status"], cancelled["phase"]) == ("accepted", "cancelled")


# -- looking --------------------------------------------------------------------------------------------------


def test_get_tells_the_story_to_people(cli: Cli) -> None:
    """One screen: phase, due, what it waits for with the command to answer it, and the timeline."""
    one = elapsed(cli, "--payload", '"tea\\u001b[31m"')
    text = cli.run("get", one["timer_ref"]).stdout
    assert "elapsed" in text
    assert f"complete|retry|fail {one['timer_ref']} 0 {one['fence']}" in text
    assert "\x1b" not in text
    cli.json("complete", one["timer_ref"], "0", str(one["fence"]))
    cli.until(lambda record: "status" in record, "get", one["timer_ref"])
    assert "completed since" in cli.run("get", one["timer_ref"]).stdout


@pytest.mark.parametrize("mode", [(), ("--json",)])
def test_get_of_an_unknown_timer_exits_1(cli: Cli, mode: tuple[str, ...]) -> None:
    """Nothing on standard output, a line on standard error."""
    done = cli.run("get", "--name", unique(), *mode)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no timer" in done.stderr


def test_list_filters(bare: Cli) -> None:
    """Phase, flow, due time and limit narrow the list; ended timers are not in it."""
    assert "no state bucket" in bare.run("list").stderr
    with Running("serve", "--http", "127.0.0.1:0", environment=bare._environment) as service:
        service.until("service.ready")
        for name, due in (("soon", "10m"), ("later", "2h"), ("gone", "1h")):
            bare.json("start", "--name", name, "--delay", due, "--payload", '{\n"a": 1}')
        bare.json("start", "--name", "past", "--at", "2020-01-01T00:00:00Z")
        bare.json("cancel", "--name", "gone")
        parts = ("--flow-id", "f1", "--flow-version", "1", "--root-execution-id", "r", "--node-id", "n")
        bare.json("start", *parts, "--delay", "3h")
        bare.until(lambda record: record["phase"] == "elapsed", "get", "--name", "past")

    def names(*arguments: str) -> list[str]:
        found = [line["timer"].get("name", line["timer"].get("flow_id")) for line in bare.lines("list", *arguments)]
        return sorted(found)

    assert names() == ["f1", "later", "past", "soon"]
    assert names("--phase", "waiting") == ["f1", "later", "soon"]
    assert names("--flow", "f1") == ["f1"]
    assert names("--due-before", "1h") == ["past", "soon"]
    assert names("--due-after", "1h") == ["f1", "later"]
    assert len(names("--limit", "2")) == 2
    assert len(bare.run("list").stdout.splitlines()) == 5
    assert names("--problems") == []


async def test_list_shows_unreadable_entries(stage: Stage, cli: Cli, desk: Any) -> None:
    """--problems names the entry and why it can't be read; the plain list goes on without it."""
    ref = name_ref(unique())
    await desk.js.publish(f"$KV.DURABLE_TIMER_STATE.{ref}", b'{"v":99}')
    assert [line["timer_ref"] for line in cli.lines("list", "--problems")] == [ref]
    assert "version 99" in cli.run("list", "--problems").stdout
    assert ref not in [line["timer_ref"] for line in cli.lines("list")]
    assert cli.run("get", ref).returncode == 1


def test_watch_follows_changes_until_interrupted(stage: Stage, cli: Cli) -> None:
    """Each change is a line; Ctrl-C ends it quietly with 130."""
    name = unique()
    with Running("watch", "--nats", stage.broker.url) as watch:
        watch.until("watching")
        cli.json("start", "--name", name, "--delay", "1h")
        watch.until(f"waiting .*{name}")
        cli.json("cancel", "--name", name)
        watch.until(f"cancelled .*{name}")
        watch.until(rf"archived .*{name_ref(name)}")
        assert watch.end() == 130
        assert "Traceback" not in watch.output


# -- running it -----------------------------------------------------------------------------------------------


def test_provision_says_what_it_did_once(bare: Cli) -> None:
    """It creates what is missing, widens what is too small, and then there is nothing to do."""
    first = bare.run("provision", "--state-max-bytes", "1000000")
    assert first.returncode == 0
    assert "created stream KV_DURABLE_TIMER_STATE" in first.stdout.splitlines()
    assert "created consumer NOTIFY_TRIGGERS_DURABLE_TIMER_RESUME" in first.stdout.splitlines()
    wider = bare.run("provision", "--state-max-bytes", "2000000")
    assert wider.stdout == "widened stream KV_DURABLE_TIMER_STATE: max_bytes 1000000 -> 2000000\n"
    assert bare.run("provision", "--state-max-bytes", "500000").stdout == "nothing to do\n"


def test_doctor_names_what_is_missing_and_what_is_well(bare: Cli) -> None:
    """It exits 1 with the resource and what to do, and 0 when all is well."""
    sick = bare.json("doctor", code=1)
    assert sick["ok"] is False
    missing = {check["resource"] for check in sick["checks"] if check["code"] == "missing"}
    assert {"KV_DURABLE_TIMER_STATE", "DURABLE_TIMER_COMMANDS > DURABLE_TIMER_COMMAND_SERVICE"} <= missing
    assert "durable-timer provision" in bare.run("doctor").stdout
    bare.run("provision")
    well = bare.json("doctor")
    assert well["ok"] is True
    assert {check["resource"] for check in well["checks"]} >= {"nats-server", "clock", "DURABLE_TIMER_RESUMES"}


def test_stats_counts(cli: Cli) -> None:
    """Messages, bytes and percent of each stream, and the backlog of each consumer."""
    cli.json("start", "--name", unique(), "--delay", "1h")
    found = cli.json("stats")
    state = found["streams"]["KV_DURABLE_TIMER_STATE"]
    assert state["messages"] >= 1
    assert 0 <= state["percent"] < 1
    assert found["consumers"]["DURABLE_TIMER_COMMAND_SERVICE"]["pending"] == 0
    assert found["server"]["version"].count(".") == 2
    assert "DURABLE_TIMER_TERMINALS" in cli.run("stats").stdout


@pytest.mark.parametrize(
    "arguments",
    [("start", "--name", "a", "--delay", "1h"), ("list",), ("doctor",)],
    ids=lambda arguments: arguments[0],
)
def test_a_broker_that_is_away_is_one_clear_line(arguments: tuple[str, ...]) -> None:
    """Exit code 1 within seconds, the URL in one line, no traceback."""
    done = Cli(NOBODY).run(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert NOBODY in line


@pytest.mark.parametrize("command", ["stats", "serve"])
@pytest.mark.parametrize(
    ("flag", "code"), [("--nats=nats://[", 1), ("--creds=/nowhere/to/be/found", 2)], ids=["url", "creds"]
)
def test_a_broker_that_can_not_be_meant_is_one_clear_line(command: str, flag: str, code: int) -> None:
    """A URL or a credentials file that can't be used is told at once, by ``serve`` too."""
    more = ("--http", "127.0.0.1:0") if command == "serve" else ()
    done = Cli(NOBODY).run(command, flag, *more)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert flag.partition("=")[2] in done.stderr.splitlines()[-1]


def test_an_address_in_use_is_named(stage: Stage) -> None:
    """A second service on the same HTTP address ends with 1 and says which address it is."""
    done = Cli(stage.broker.url).run("serve", "--http", f"127.0.0.1:{stage.service.port}")
    assert done.returncode == 1
    assert f"127.0.0.1:{stage.service.port}: Address already in use" in done.stderr.splitlines()[-1]


def test_a_start_without_a_service_says_so(bare: Cli) -> None:
    """With streams but without a service the command is stored, and the message says how to ask again."""
    assert "durable-timer doctor" in bare.run("start", "--name", "a", "--delay", "1h").stderr
    bare.run("provision")
    done = bare.run("start", "--name", "a", "--delay", "1h", "--timeout-ms", "200", "--command-id", "mine")
    assert done.returncode == 1
    assert "it is stored and will be carried out" in done.stderr
    assert "--command-id mine" in done.stderr


def test_a_reader_that_goes_away_is_no_error_message(cli: Cli, stage: Stage) -> None:
    """``list | head`` prints nothing about pipes."""
    for _ in range(3):
        cli.json("start", "--name", unique(), "--delay", "1h")
    command = f"{Path(sys.executable).with_name('durable-timer')} list --nats {stage.broker.url} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


def test_the_version_is_told() -> None:
    """--version prints name and version."""
    assert Cli(NOBODY).run("--version").stdout.startswith("durable-timer 0.")


def test_json_is_never_mixed_with_words(cli: Cli) -> None:
    """With --json standard output holds JSON alone, also for a list of nothing."""
    done = cli.run("list", "--flow", unique(), "--json")
    assert (done.returncode, done.stdout) == (0, "")
    for line in cli.run("list", "--json").stdout.splitlines():
        json.loads(line)
