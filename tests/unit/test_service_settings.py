"""The settings of ``durable-timer serve``: names, defaults and limits are part of the contract."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from timer_service.cli import app
from timer_service.config import Settings

FIXED: dict[str, Any] = {
    "NATS_URL": "nats://127.0.0.1:4222", "NATS_CREDS": None, "HTTP": "127.0.0.1:8080", "DRIVER": "heap",
    "TEST_CLOCK": False, "REPLY_PREFIX": "_INBOX.", "ADMISSION_WATERMARK_PERCENT": 50,
    "INLINE_PAYLOAD_MAX_BYTES": 1024, "REPLICAS": 1, "RESUME_TIMEOUT_MS": 60_000,
    "RECONCILE_INTERVAL_MS": 3_600_000, "POLICY_CHECK_INTERVAL_MS": 10_000, "REQUEST_TIMEOUT_MS": 5_000,
    "DRAIN_GRACE_MS": 10_000, "TOMBSTONE_TTL_S": 3_600, "ARCHIVE_MAX_AGE_S": 90 * 86_400,
    "SNAPSHOT_GRACE_MS": 600_000,
}  # fmt: skip
SIZES = ["STATE", "SNAPSHOTS", "COMMANDS", "RESUMES", "TERMINALS"]


def _field(name: str) -> str:
    return {"NATS_URL": "nats", "NATS_CREDS": "creds"}.get(name, name.lower())


@pytest.fixture(autouse=True)
def _no_settings_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*FIXED, *(f"{size}_MAX_BYTES" for size in SIZES)]:
        monkeypatch.delenv(f"DURABLE_TIMER_{name}", raising=False)


@pytest.mark.parametrize("name", FIXED)
def test_defaults_are_as_the_contract_has_them(name: str) -> None:
    """What nobody sets has the value that the contract names."""
    assert getattr(Settings(), _field(name)) == FIXED[name]


@pytest.mark.parametrize("urls", ["h:1", "nats://u:p@h:1,nats://i:2", "tls://h", "ws://h:1,ws://i:1", "nats://[::1]:1"])
def test_urls_of_every_kind_are_taken(urls: str) -> None:
    """One server or several, with a scheme of NATS or none."""
    assert Settings(nats=urls).nats == urls


def test_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fixed name is read from DURABLE_TIMER_…."""
    given = {"RESUME_TIMEOUT_MS": 777, "REPLY_PREFIX": "_R.", "NATS_URL": "nats://h:1", "STATE_MAX_BYTES": 70_000}
    for name, value in given.items():
        monkeypatch.setenv(f"DURABLE_TIMER_{name}", str(value))
    settings = Settings()
    assert [getattr(settings, _field(name)) for name in given] == list(given.values())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RECONCILE_INTERVAL_MS", 100), ("SNAPSHOT_GRACE_MS", 100), ("RESUME_TIMEOUT_MS", 100), ("TOMBSTONE_TTL_S", 1),
        ("ARCHIVE_MAX_AGE_S", 1), ("STATE_MAX_BYTES", 16_384), ("DRAIN_GRACE_MS", 0), ("INLINE_PAYLOAD_MAX_BYTES", 0),
    ],
)  # fmt: skip
def test_small_values_are_taken(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    """Whoever tries something out, need not wait for it, nor fill a gigabyte."""
    monkeypatch.setenv(f"DURABLE_TIMER_{name}", str(value))
    assert getattr(Settings(), _field(name)) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HTTP", "8080"), ("DRIVER", "cron"), ("ADMISSION_WATERMARK_PERCENT", "0"), ("REPLICAS", "six"),
        ("RESUME_TIMEOUT_MS", "-1"), ("REPLY_PREFIX", "$KV."), ("REPLY_PREFIX", "a b"), ("REPLY_PREFIX", ">"),
        ("STATE_MAX_BYTES", "1"), ("NATS_CREDS", "/no/such/file"), ("TOMBSTONE_TTL_S", "0"),
        ("POLICY_CHECK_INTERVAL_MS", "60000"), ("NATS_URL", "http://h:1"), ("NATS_URL", "nats://h:1,"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """Nothing is connected with a setting that can't be meant."""
    monkeypatch.setenv(f"DURABLE_TIMER_{name}", value)
    with pytest.raises(ValidationError):
        Settings()


def test_help_lists_every_setting() -> None:
    """`serve --help` has each flag and variable whole, however narrow the terminal; a pipe counts as 80 columns."""
    text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "80"}).output
    for field in Settings.model_fields:
        assert f"--{field.replace('_', '-')} " in text, field
    for name in [*FIXED, *(f"{size}_MAX_BYTES" for size in SIZES)]:
        assert f"DURABLE_TIMER_{name}" in text, name
