"""Two minutes of a quiet service (C36) as a process that runs beside the other tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

_RUN_S = 200.0
_ARGUMENTS = ("--minutes", "2", "--every", "1.7", "--pause", "7", "--pause-each", "6")


class Steady:
    """Started once a run; ``result`` waits for it. Its own broker and service are its children."""

    def __init__(self) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed by ``close``)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.steady", *_ARGUMENTS],
            stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT, env={**os.environ},
        )  # fmt: skip
        self._seen: dict[str, Any] | None = None

    def result(self) -> dict[str, Any]:
        """What it measured."""
        if self._seen is None:
            self._process.wait(_RUN_S)
            self._output.seek(0)
            text = self._output.read().decode()
            assert text.startswith("{"), text
            self._seen = json.loads(text)
        return self._seen

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait(30)
        self._output.close()
