"""Writes the JSON schema of every message, one file each: ``python -m timer_service.wire.schemas docs/schemas``.

The same models give the same bytes, so that a change of the format shows up as a change of these files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode

from timer_service.wire import models
from timer_service.wire.fields import Model

MESSAGES: Final[dict[str, type[Model]]] = {
    **{f"command.{kind}": model for kind, model in models.COMMANDS.items()},
    "outcome": models.Outcome,
    "rejection": models.Rejection,
    "removal": models.Removal,
    "resume": models.Resume,
    "state": models.State,
    "terminal": models.Terminal,
    "wake": models.Wake,
}
"""Which message has which model. File names follow from the names here, with the version of the format."""


class _Generator(GenerateJsonSchema):
    """Names the dialect; adds no titles to fields, which would only repeat their names."""

    def generate(self, schema: Any, mode: JsonSchemaMode = "validation") -> dict[str, Any]:
        return {"$schema": self.schema_dialect, **super().generate(schema, mode)}

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - pydantic's signature
        return False


def file_name(name: str) -> str:
    return f"{name}.v1.json"


def schema_of(name: str) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of the message ``name``."""
    schema = MESSAGES[name].model_json_schema(schema_generator=_Generator)
    return {"$schema": schema.pop("$schema"), "$id": f"urn:durable-timer:{name}:v1", **schema}


def schema_text(name: str) -> str:
    """The same as it stands in its file."""
    return json.dumps(schema_of(name), indent=2, ensure_ascii=True) + "\n"


def write_schemas(folder: Path) -> list[Path]:
    """Write all schemas into ``folder``, which is made if need be; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name in MESSAGES:
        file = folder / file_name(name)
        file.write_text(schema_text(name))
        files.append(file)
    return files


def main(arguments: list[str], say: Callable[[str], object] = print) -> int:
    """The program; returns its exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        say("usage: python -m timer_service.wire.schemas FOLDER")
        return 2
    files = write_schemas(Path(arguments[0]))
    say(f"{len(files)} schemas in {arguments[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
