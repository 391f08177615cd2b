"""What is secret in a URL is never shown."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from timer_service.cli import app, session
from timer_service.urls import hide_secrets, shown_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://127.0.0.1:4222", "nats://127.0.0.1:4222"),
        ("nats://me:secret@host:4222", "nats://me:***@host:4222"),
        ("nats://secrettoken@host", "nats://***@host"),
        ("nats://a:secret@h1,tls://b:secret@h2,nats://h3", "nats://a:***@h1,tls://b:***@h2,nats://h3"),
        ("postgresql://me:secret@h1:5432,h2/db", "postgresql://me:***@h1:5432,h2/db"),
        ("postgresql://me@host/db?sslmode=require", "postgresql://me@host/db?sslmode=require"),
        ("postgresql://host/db?user=me&password=secret&sslmode=off", "postgresql://host/db?user=me&password=***&sslmode=off"),
        ("postgresql://host/db?sslpassword=secret", "postgresql://host/db?sslpassword=***"),
        ("postgresql://me:sec/ret@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me:sec@ret@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me:sec,ret#x@host/db", "postgresql://me:***@host/db"),
        ("postgresql:me:secret@host/db", "postgresql:me:***@host/db"),
        ("mongodb://me:secret@h1,h2/db?replicaSet=r", "mongodb://me:***@h1,h2/db?replicaSet=r"),
        ("mongodb://h/db?tlsCertificateKeyFilePassword=secret", "mongodb://h/db?tlsCertificateKeyFilePassword=***"),
        ("me:secret@host", "me:***@host"),
        ("sqlite:folder@home/a.db", "sqlite:folder@home/a.db"),
        ("127.0.0.1:8080", "127.0.0.1:8080"),
    ],
)  # fmt: skip
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    """Host, user and options stay readable; passwords and tokens do not, however badly they are escaped."""
    assert shown_url(url) == shown


def test_secrets_are_taken_out_of_texts() -> None:
    """The longest first, and an empty one hides nothing."""
    assert hide_secrets("no abc in abcd", ["", "abc", "abcd"]) == "no *** in ***"


def test_no_command_shows_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command line says about a broker that is not there names it without its secrets."""
    monkeypatch.setattr(session, "CONNECT_TIMEOUT_S", 0.2)
    result = CliRunner().invoke(app, ["stats", "--nats", "nats://me:s3cret@127.0.0.1:1"])
    assert result.exit_code == 1
    assert "s3cret" not in result.output
    assert "nats://me:***@127.0.0.1:1" in result.output
