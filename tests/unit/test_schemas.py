"""The published JSON schemas are those of the models, and say what the models say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from timer_service.wire.schemas import MESSAGES, file_name, main, schema_of, schema_text, write_schemas

PUBLISHED = Path(__file__).parents[2] / "docs/schemas"


def test_each_message_has_one_file_and_each_file_a_message():
    """Nothing is missing, and nothing is left over from a message that is gone."""
    assert {file.name for file in PUBLISHED.glob("*.json")} == {file_name(name) for name in MESSAGES}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_files_are_current(name: str):
    """``make schemas`` would change nothing."""
    assert (PUBLISHED / file_name(name)).read_text() == schema_text(name)


@pytest.mark.parametrize("name", MESSAGES)
def test_each_is_a_schema_and_strict(name: str):
    """Draft 2020-12, with an id of its own; objects take no unknown fields, and every message is described."""
    schema = schema_of(name)
    Draft202012Validator.check_schema(schema)
    assert schema["$id"] == f"urn:durable-timer:{name}:v1"
    assert schema["description"]
    for part in (schema, *schema.get("$defs", {}).values()):
        assert part["type"] != "object" or part["additionalProperties"] is False


@pytest.mark.parametrize("name", [name for name in MESSAGES if not name.startswith("command.")])
def test_what_the_service_sends_has_no_surprises(name: str):
    """Every field has a default that the service leaves out, or is required."""
    schema = schema_of(name)
    for field, rules in schema["properties"].items():
        assert ("default" in rules) != (field in schema["required"]), field


DUES: list[tuple[Any, bool]] = [
    ({"delay_ms": 1}, True),
    ({"at": "2030-01-01T00:00:00Z"}, True),
    ({"at_ms": 0, "at": None}, True),
    ({}, False),
    ({"delay_ms": None}, False),
    ({"delay_ms": 1, "at_ms": 1}, False),
    ({"delay_ms": 0}, False),
    ({"delay_ms": "5"}, False),
    ({"delay_ms": 1, "in": 1}, False),
]


@pytest.mark.parametrize(("due", "verdict"), DUES, ids=ascii)
def test_exactly_one_form_of_due(due: Any, verdict: bool):
    """The schema alone says that exactly one form is needed, null ones not counted."""
    fields = {"v": 1, "command_id": "c", "timer": {"name": "a"}, "due": due}
    assert Draft202012Validator(schema_of("command.start")).is_valid(fields) is verdict


def test_writing_is_repeatable(tmp_path: Path):
    """Twice into the same new folder gives the same files with the same bytes."""
    first = {file: file.read_bytes() for file in write_schemas(tmp_path / "new")}
    second = {file: file.read_bytes() for file in write_schemas(tmp_path / "new")}
    assert first == second
    assert len(first) == len(MESSAGES)


def test_the_program(tmp_path: Path):
    """It takes one folder and says what it did; anything else is a usage error and writes nothing."""
    said: list[str] = []
    assert main([str(tmp_path / "out")], said.append) == 0
    assert len(list((tmp_path / "out").iterdir())) == len(MESSAGES)
    for wrong in ([], ["a", "b"], ["--help"]):
        assert main(wrong, said.append) == 2
    assert [line.split()[0] for line in said] == [str(len(MESSAGES)), "usage:", "usage:", "usage:"]
