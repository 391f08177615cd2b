"""The command line to its edges: completion, machines, many timers, and every exit code."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.broker import Broker
from tests.support.cli import DURABLE_TIMER, Cli, Running
from tests.support.service import Desk, Engine, Service, eventually, name_ref, now_ms, unique
from tests.support.stage import Stage
from timer_service.jetstream import topology

COMMANDS = [
    "start", "cancel", "complete", "retry", "fail", "get", "list", "watch", "serve", "provision", "doctor", "stats",
    "dev", "demo",
]  # fmt: skip
HOUR_MS = 3_600_000
MANY = 3_000


@pytest.fixture
async def cli(stage: Stage) -> Cli:
    await stage.service.ready()
    return Cli(stage.broker.url)


def environment(**other: str) -> dict[str, str]:
    return {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **other}


# -- completion and help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shell", "told"), [("bash", "complete -o default"), ("zsh", "\ncompdef "), ("fish", "complete --command ")]
)
def test_completion_is_shown_for_each_shell(shell: str, told: str) -> None:
    """--show-completion prints what the shell evaluates; named, since it may not be a shell that starts the tests."""
    named = environment(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    done = subprocess.run([DURABLE_TIMER, "--show-completion", shell], capture_output=True, text=True, env=named)
    assert done.returncode == 0
    assert "_DURABLE_TIMER_COMPLETE" in done.stdout
    assert told in done.stdout


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("durable-timer do", ["doctor"]),
        ("durable-timer c", ["cancel", "complete"]),
        ("durable-timer list --pro", ["--problems"]),
        ("durable-timer list --phase ", ["waiting", "elapsed", "completed", "failed", "cancelled"]),
        ("durable-timer serve --tomb", ["--tombstone-ttl-s"]),
    ],
)
def test_the_shell_completes(line: str, offered: list[str]) -> None:
    """Commands, options and their values, as bash asks for them."""
    words = {
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
        "_DURABLE_TIMER_COMPLETE": "complete_bash",
    }
    done = subprocess.run(
        [DURABLE_TIMER], capture_output=True, text=True, env=environment(**words)
    )  # fmt: skip
    assert done.stdout.split() == offered


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    """--help exits 0 and says what the command does; each of the fixed options has its place."""
    done = Cli("nats://127.0.0.1:9").run(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    if command not in ("dev", "demo"):
        assert "--nats" in done.stdout
        assert "--creds" in done.stdout
    if command not in ("serve", "dev", "demo"):
        assert "--json" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nonsense"], "No such command"),
        (["start"], "--name"),
        (["start", "--name", "a"], "--delay"),
        (["start", "--name", "a", "--delay", "5 parsecs"], "not a duration"),
        (["start", "--name", "a", "--delay", "1h", "--payload", "{"], "not JSON"),
        (["get"], "TIMER_REF or --name"),
        (["get", "abc"], "named with --name"),
        (["complete", "abc", "0", "1"], "'abc' is not"),
        (["retry", "a" * 26, "x", "1"], "GENERATION"),
        (["list", "--due-before", "soon"], "RFC 3339"),
        (["list", "--limit", "0"], "--limit"),
        (["serve", "--resume-timeout-ms", "1"], "--resume-timeout-ms"),
        (["provision", "--replicas", "9"], "--replicas"),
    ],
    ids=lambda value: "-".join(value)[:30] if isinstance(value, list) else None,
)
def test_what_was_asked_for_wrongly_exits_2(arguments: list[str], word: str) -> None:
    """Before anything is connected: which argument, and what it should be."""
    done = Cli("nats://127.0.0.1:9").run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert word in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


# -- for machines -----------------------------------------------------------------------------------------------


def test_provision_tells_machines_too(tmp_path: Path) -> None:
    """--json prints one line: what was done, and then nothing."""
    with Broker(tmp_path / "nats") as broker:
        done = Cli(broker.url).json("provision")["done"]
        assert f"created stream {topology.STATE_STREAM}" in done
        assert Cli(broker.url).json("provision") == {"done": []}


def test_watch_tells_machines_too_and_of_one_timer_only(stage: Stage, cli: Cli) -> None:
    """Each change is one line of JSON, that of other timers is none; SIGINT ends it with 130, quietly."""
    mine, other = unique(), unique()
    with Running("watch", "--name", mine, "--json", "--nats", stage.broker.url) as watch:
        _watched(cli, watch, mine)
        cli.json("start", "--name", other, "--delay", "1h")
        cli.json("cancel", "--name", mine)
        watch.until('"removed": ?true')
        assert watch.end(signal.SIGINT) == 130
    lines = [json.loads(line) for line in watch.output.splitlines()]
    assert {line["timer_ref"] for line in lines} == {name_ref(mine)}
    assert [line.get("phase") for line in lines][-2:] == ["cancelled", None]


def _watched(cli: Cli, watch: Running, name: str) -> None:
    """Change the timer until the watch shows that it is there."""
    deadline = time.monotonic() + 20
    while '"waiting"' not in watch.output:
        assert time.monotonic() < deadline, watch.output
        cli.json("start", "--name", name, "--delay", "1h")


# -- the story --------------------------------------------------------------------------------------------------


async def test_get_says_why_it_was_late_and_who_answered(broker: Broker, tmp_path: Path) -> None:
    """One screen: the service was away, so it fired late, and this command ended it."""
    with Service(broker.url, tmp_path) as service:
        await service.ready()
        async with Desk.at(broker.url) as desk, Engine(desk) as engine:
            name = unique()
            outcome = await desk.ask("start", timer={"name": name}, due={"delay_ms": 400})
            service.kill()
            await eventually(lambda: now_ms() > outcome["due_at_ms"] + 300)
            assert "it is overdue" in Cli(broker.url).run("get", "--name", name).stdout
            service.start()
            resume = await engine.resume_of(name_ref(name), within=20)
            assert "waits for" in Cli(broker.url).run("get", "--name", name).stdout
            await engine.reply(resume, "complete", command_id="the-engine-7")
            await desk.ended(name_ref(name))
            story = Cli(broker.url).run("get", "--name", name).stdout
            assert "nobody woke it: service or broker away" in story
            assert "the-engine-7" in story
            assert "waits for" not in story
            assert len(story.splitlines()) < 24, "more than one screen"


# -- many timers ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker for the timers of this module alone."""
    with Broker(tmp_path_factory.mktemp("many") / "nats") as running:
        yield running


async def _filled(many: Broker, folder: Path) -> None:
    async with Desk.at(many.url) as desk:
        if await _exists(desk) and await desk.count(topology.STATE_STREAM) == MANY:
            return
        with Service(many.url, folder) as service:
            await service.ready()
            await desk.send_many(
                "start", [{"timer": {"name": f"n{n}"}, "due": {"delay_ms": HOUR_MS + n}} for n in range(MANY)]
            )
            deadline = time.monotonic() + 30
            while await desk.count(topology.STATE_STREAM) < MANY:
                assert time.monotonic() < deadline


async def _exists(desk: Desk) -> bool:
    try:
        await desk.js.stream_info(topology.STATE_STREAM)
    except Exception:
        return False
    return True


async def test_thousands_are_listed_completely(many: Broker, tmp_path: Path) -> None:
    """Every timer once, for machines and for people; a limit stops early."""
    await _filled(many, tmp_path)
    begun = time.monotonic()
    lines = Cli(many.url).lines("list")
    took_s = time.monotonic() - begun
    print(f"{MANY} timers listed in {took_s:.1f} s")
    assert {line["timer"]["name"] for line in lines} == {f"n{n}" for n in range(MANY)}
    assert len(lines) == MANY
    shown = Cli(many.url).run("list").stdout.splitlines()
    assert len(shown) == MANY + 1
    assert shown[0].startswith("PHASE")
    assert len(Cli(many.url).lines("list", "--limit", "10")) == 10
    assert Cli(many.url).lines("list", "--flow", "nobody") == []


async def test_long_work_shows_how_far_it_is(many: Broker, tmp_path: Path) -> None:
    """On a terminal a bar counts while nothing else is seen; into a file goes no word of it."""
    await _filled(many, tmp_path)
    out = tmp_path / "list.jsonl"
    shown = on_a_terminal([str(DURABLE_TIMER), "list", "--json", "--nats", many.url], out)
    assert re.search(rf"reading.*\b\d+/{MANY}\b", shown), shown
    assert len(out.read_text().splitlines()) == MANY
    quiet = Cli(many.url).run("list", "--json")
    assert quiet.stderr == ""


def on_a_terminal(command: list[str], out: Path) -> str:
    """Run a command with standard error on a terminal; returns what that showed."""
    leader, follower = pty.openpty()
    with out.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=follower,
            env={**os.environ, "COLUMNS": "120", "TERM": "xterm"},
        )  # fmt: skip
    os.close(follower)
    shown: list[bytes] = []
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if select.select([leader], [], [], 0.1)[0]:
            try:
                shown.append(os.read(leader, 65_536))
            except OSError:  # the other end is closed
                break
        elif process.poll() is not None:
            break
    os.close(leader)
    assert process.wait(10) == 0
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(shown).decode(errors="replace"))


# -- exit codes -------------------------------------------------------------------------------------------------


def test_interrupting_a_wait_is_quiet(tmp_path: Path) -> None:
    """Ctrl-C while a command waits for its outcome: 130, no traceback, and the way to ask again."""
    with Broker(tmp_path / "nats") as broker:
        Cli(broker.url).run("provision")
        arguments = ("start", "--name", "a", "--delay", "1h", "--timeout-ms", "60000", "--nats", broker.url)
        with Running(*arguments) as started:
            deadline = time.monotonic() + 20
            while Cli(broker.url).json("stats")["streams"][topology.COMMANDS]["messages"] == 0:
                assert time.monotonic() < deadline
            assert started.end(signal.SIGINT) == 130
            assert "Traceback" not in started.output


def test_looking_without_the_service_still_works(tmp_path: Path) -> None:
    """get, list and stats ask the broker, not the service; on an empty broker they say what is missing."""
    with Broker(tmp_path / "nats") as broker:
        cli = Cli(broker.url)
        answers: dict[str, Any] = {name: cli.run(*name.split()) for name in ("list", "watch", f"get {'a' * 26}")}
        assert {done.returncode for done in answers.values()} == {1}
        assert all("durable-timer" in done.stderr and "Traceback" not in done.stderr for done in answers.values())
        assert cli.json("stats")["streams"][topology.STATE_STREAM] is None
        cli.run("provision")
        assert cli.run("list").returncode == 0
        assert cli.json("stats")["streams"][topology.STATE_STREAM]["messages"] == 0
