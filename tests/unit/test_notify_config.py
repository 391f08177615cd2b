"""Settings and command line of the notify consumer: names, defaults, checks, and looking into the outbox."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from notify_consumer.app import App
from notify_consumer.cli import app
from notify_consumer.config import Settings
from notify_consumer.errors import BadSetting
from notify_consumer.handlers import Handlers
from notify_consumer.loading import load_handlers
from notify_consumer.outbox import check_outbox, make_outbox
from notify_consumer.outbox.base import NewRow
from notify_consumer.outbox.sqlite import SqliteOutbox
from tests.support.notify import new_row, resume_body
from timer_service.http import Reason

# The table of the contract, section 7: flag, variable, default.
FIXED = [
    ("--nats", "NATS_URL", "nats://127.0.0.1:4222"),
    ("--creds", "NATS_CREDS", "none"),
    ("--http", "HTTP", "127.0.0.1:8081"),
    ("--instance", "INSTANCE", None),
    ("--handlers", "HANDLERS", "none"),
    ("--outbox", "OUTBOX", "sqlite:notify-consumer.db"),
    ("--lease-ms", "LEASE_MS", "30000"),
    ("--backoff-initial-ms", "BACKOFF_INITIAL_MS", "3000"),
    ("--backoff-max-ms", "BACKOFF_MAX_MS", "30000"),
    ("--max-attempts", "MAX_ATTEMPTS", "none"),
    ("--concurrency", "CONCURRENCY", "32"),
]


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in Settings.model_fields:
        monkeypatch.delenv(f"NOTIFY_CONSUMER_{name.upper()}", raising=False)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "80", "TERM": "dumb"})


@pytest.mark.parametrize(("flag", "variable", "default"), FIXED)
def test_help_lists_every_setting_of_the_contract(flag: str, variable: str, default: str | None) -> None:
    """`serve --help` has each flag, its variable and its default."""
    text = run("serve", "--help").output
    assert f"{flag} " in text
    assert f"NOTIFY_CONSUMER_{variable};" in text
    text = re.sub(r"\s+", "", text)
    shown = f"NOTIFY_CONSUMER_{variable};default:"
    assert shown + default + "]" in text if default else shown in text


def test_the_environment_counts_and_flags_count_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables set what no flag sets, under the names of the contract."""
    monkeypatch.setenv("NOTIFY_CONSUMER_NATS_URL", "nats://elsewhere:4222")
    monkeypatch.setenv("NOTIFY_CONSUMER_LEASE_MS", "5000")
    monkeypatch.setenv("NOTIFY_CONSUMER_MAX_ATTEMPTS", "7")
    settings = Settings(lease_ms=6_000)
    assert (settings.nats, settings.lease_ms, settings.max_attempts) == ("nats://elsewhere:4222", 6_000, 7)
    assert settings.policy.lease_ms == 6_000


@pytest.mark.parametrize(
    ("flag", "value", "complaint"),
    [
        ("--http", "8081", "HOST:PORT"),
        ("--http", "127.0.0.1:99999", "HOST:PORT"),
        ("--creds", "missing.creds", "file that is there"),
        ("--instance", "", "at least 1"),
        ("--handlers", "not/a/module", "MODULE"),
        ("--handlers", "a:b:c", "MODULE"),
        ("--outbox", "mysql://x", "sqlite:PATH"),
        ("--outbox", "sqlite:", "sqlite:PATH"),
        ("--outbox", "postgresql://", "postgresql://USER@HOST/DATABASE"),
        ("--outbox", "postgresql://h/d?sslmod=require", 'invalid URI query parameter: "sslmod"'),
        ("--outbox", "postgresql://h:port/d", "a port has to be a number (and a password to be escaped)"),
        ("--outbox", "mongodb://me:a@b@h/d", "passwords have to be escaped"),
        ("--outbox", "mongodb://h:port/d", "not a URL that MongoDB's driver understands"),
        ("--lease-ms", "0", "greater than or equal to 100"),
        ("--lease-ms", "soon", "valid integer"),
        ("--backoff-initial-ms", "0", "greater than or equal to 1"),
        ("--backoff-max-ms", "2999", "less than backoff_initial_ms"),
        ("--max-attempts", "0", "greater than or equal to 1"),
        ("--concurrency", "0", "greater than or equal to 1"),
        ("--drain-grace-ms", "-1", "greater than or equal to 0"),
        ("--request-timeout-ms", "99", "greater than or equal to 100"),
        ("--keep-done-s", "604799", "greater than or equal to 604800"),
    ],
)
def test_a_wrong_value_is_refused_at_the_start(flag: str, value: str, complaint: str) -> None:
    """Exit code 2, one line that names flag and variable and says what it must be."""
    result = run("serve", "--handlers", "x", flag, value)
    assert result.exit_code == 2
    line = next(line for line in result.output.splitlines() if line.startswith(flag))
    assert "NOTIFY_CONSUMER_" in line
    assert complaint in line


def test_without_handlers_there_is_nothing_to_serve() -> None:
    """The one setting without a default is asked for by name."""
    result = run("serve")
    assert result.exit_code == 2
    assert "--handlers MODULE[:ATTRIBUTE] is needed" in result.output


# -- handlers -------------------------------------------------------------------------------------------------


@pytest.fixture
def modules(tmp_path: Path) -> Iterator[Path]:
    """A working folder with modules of handlers; they are forgotten afterwards."""
    before, path = set(sys.modules), list(sys.path)
    good = "from notify_consumer import Handlers\nhandlers = Handlers()\nother = Handlers()\n"
    (tmp_path / "good_handlers.py").write_text(good + "handlers.default(lambda resume: None)\n")
    (tmp_path / "broken_handlers.py").write_text("1 / 0\n")
    (tmp_path / "needy_handlers.py").write_text("import not_installed\n")
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.endswith("_handlers"):
            del sys.modules[name]


def test_handlers_are_found_in_the_working_folder(modules: Path) -> None:
    """MODULE alone means its attribute `handlers`; the folder in which the program runs is searched."""
    assert len(load_handlers("good_handlers")) == 1
    assert len(load_handlers("good_handlers:handlers")) == 1


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ("nowhere_handlers", "there is no module nowhere_handlers"),
        ("nowhere_handlers.deeper", "there is no module nowhere_handlers.deeper"),
        ("good_handlers:missing", "good_handlers.missing is not a notify_consumer.Handlers"),
        ("good_handlers:other", "nothing is registered"),
        ("broken_handlers", "can't be imported: ZeroDivisionError"),
        ("needy_handlers", "can't be imported: No module named 'not_installed'"),
    ],
)
def test_handlers_that_cannot_be_had_are_told(modules: Path, place: str, complaint: str) -> None:
    """What is wrong with --handlers is said in one line."""
    with pytest.raises(BadSetting, match=re.escape(complaint)):
        load_handlers(place)


# -- outbox ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "file"), [("sqlite:a.db", "a.db"), ("sqlite://a.db", "a.db"), ("sqlite:deep er/a?#.db", "deep er/a?#.db")]
)
def test_an_outbox_is_named_by_a_url(tmp_path: Path, url: str, file: str) -> None:
    """sqlite:PATH, relative to the working folder; folders are made."""
    outbox = make_outbox(url)
    asyncio.run(_closed(outbox.open(), outbox))
    assert (tmp_path / file).is_file()


async def _closed(work: object, outbox: object) -> None:
    await work  # type: ignore[misc]
    await outbox.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("postgresql://me@h1,h2/d?target_session_attrs=read-write", "PostgresOutbox"),
        ("postgres:///d", "PostgresOutbox"),
        ("mongodb://me:p%40ss@h1,h2/d?replicaSet=r", "MongoOutbox"),
    ],
)
def test_an_outbox_may_be_a_server(url: str, kind: str) -> None:
    """The URL goes to the driver as it is; nothing is connected yet."""
    assert type(make_outbox(check_outbox(url))).__name__ == kind


@pytest.mark.parametrize(
    ("url", "module", "extra"), [("postgresql://h/d", "psycopg", "postgres"), ("mongodb://h/d", "pymongo", "mongodb")]
)
def test_a_driver_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, url: str, module: str, extra: str) -> None:
    """Exit code 2, and what to install."""
    for name in [
        name for name in sys.modules if name.startswith(f"notify_consumer.outbox.{url.partition(':')[0][:6]}")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    result = run("serve", "--handlers", "x", "--outbox", url)
    assert result.exit_code == 2
    assert f"pip install durable-timer[{extra}]" in result.output


@pytest.mark.parametrize(
    "url", ["postgresql://me:s3cret@127.0.0.1:1/d", "mongodb://me:s3cret@h?bad=1", "mysql://me:s3cret@h"]
)
@pytest.mark.parametrize("command", ["list", "serve"])
def test_no_complaint_shows_the_password(url: str, command: str) -> None:
    """Whatever is wrong with the outbox or its URL: user and host are told, the password is not."""
    given = ("serve", "--handlers", "nowhere_handlers") if command == "serve" else ("outbox", "list")
    result = run(*given, "--outbox", url)
    assert result.exit_code != 0
    assert "s3cret" not in result.output
    assert "me:***@" in result.output or command == "serve"


@pytest.mark.parametrize("url", ["postgresql://me:s3cret@127.0.0.1:1/d", "sqlite:folder/a@b.db"])
def test_readiness_shows_no_password(url: str) -> None:
    """Neither reasons nor logs name outbox or broker with their secrets."""

    async def reasons() -> list[Reason]:
        composed = App(Settings(outbox=url, nats="nats://me:s3cret@127.0.0.1:1", http="127.0.0.1:0"), Handlers())
        try:
            return composed.readiness().reasons
        finally:
            await composed.outbox.close()

    found = {reason.code: reason for reason in asyncio.run(reasons())}
    assert found["outbox_unavailable"].resource == url.replace("s3cret", "***")
    assert found["broker_unreachable"].resource == "nats://me:***@127.0.0.1:1"
    assert "s3cret" not in repr(found)


@pytest.fixture
def filled(tmp_path: Path) -> str:
    """The URL of an outbox with a pending, a dead and an unreadable row."""

    async def fill() -> None:
        outbox = SqliteOutbox(str(tmp_path / "outbox.db"))
        unreadable = NewRow("x" * 26 + ".0", "unreadable", b"{", unreadable="not JSON")
        await outbox.insert([new_row("dead", lane="y"), new_row("pending"), unreadable])
        (claim,) = await outbox.claim("me", {"y": 1}, 60_000)
        await outbox.kill(claim, "enough is enough")
        await outbox.close()

    asyncio.run(fill())
    return "sqlite:outbox.db"


DEAD = resume_body("dead")["resume_id"]
PENDING = resume_body("pending")["resume_id"]


def test_the_outbox_can_be_listed(filled: str) -> None:
    """For people a table with the errors, for machines JSON with counts; --state narrows it."""
    assert "enough is enough" in run("outbox", "list", "--outbox", filled).output
    listed = json.loads(run("outbox", "list", "--outbox", filled, "--json", "--state", "dead").output)
    assert listed["counts"] == {"pending": 1, "claimed": 0, "answered": 0, "done": 0, "dead": 2}
    assert {row["last_error"] for row in listed["rows"]} == {"enough is enough", "not JSON"}


def test_a_row_can_be_shown(filled: str) -> None:
    """All of a row, with the resume in it; an unknown one is exit code 1."""
    shown = json.loads(run("outbox", "show", DEAD, "--outbox", filled).output)
    assert (shown["state"], shown["resume"]["payload"]) == ("dead", {"n": 1})
    unreadable = json.loads(run("outbox", "show", "x" * 26 + ".0", "--outbox", filled).output)
    assert unreadable["resume"] == "{"
    assert run("outbox", "show", "nobody.0", "--outbox", filled).exit_code == 1


def test_a_dead_row_can_be_revived(filled: str) -> None:
    """Reviving says what it did; what is not dead is exit code 1."""
    assert run("outbox", "revive", DEAD, "--outbox", filled).output == f"{DEAD} is pending\n"
    assert run("outbox", "revive", PENDING, "--outbox", filled).exit_code == 1
    assert json.loads(run("outbox", "show", DEAD, "--outbox", filled).output)["state"] == "pending"


def test_purging_says_how_many(filled: str) -> None:
    """Only done rows are removed."""
    assert run("outbox", "purge", "--older-than-s", "0", "--outbox", filled).output == "removed 0\n"
    assert json.loads(run("outbox", "list", "--outbox", filled, "--json").output)["counts"]["dead"] == 2


def test_looking_does_not_make_an_outbox(tmp_path: Path) -> None:
    """A mistyped path is an error, not a new empty file."""
    result = run("outbox", "list", "--outbox", "sqlite:typo.db")
    assert result.exit_code == 1
    assert "typo.db" in result.output
    assert not (tmp_path / "typo.db").exists()
