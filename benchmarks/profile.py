"""Where the service's processor time goes: a throughput run under the standard library's profiler.

    python -m benchmarks.profile [--contender everyday] [--seconds 8] [--keep FILE]

The profiler makes everything slower, calls most of all: read the order of the list, not the rates.
"""

import argparse
import json
import pstats
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.broker import running_broker
from benchmarks.contenders import CONTENDERS, ROOT, Contender, ContenderError, serving
from timer_service.embedded import EmbeddedServerError

_LINES = 25


def profile(contender: Contender, seconds: float, keep: Path | None) -> None:
    """Run the load against the profiled contender and print the functions that used most time themselves."""
    with tempfile.TemporaryDirectory() as folder:
        path = keep or Path(folder) / "profile.out"
        with running_broker() as broker, serving(contender, broker.url, profile=str(path.resolve())):
            measured = _load(broker.url, seconds)
        if not path.exists():
            raise ContenderError(f"{contender.name} wrote no profile: it did not stop at SIGTERM")
        rate = json.loads(measured)["lifecycles_per_s"]
        print(f"{contender.name}: {rate:,.0f} lifecycles/s under the profiler")
        _print_top(path)


def _load(url: str, seconds: float) -> str:
    command = [
        sys.executable,
        "-m",
        "benchmarks.load",
        "throughput",
        "--nats",
        url,
        "--seconds",
        str(seconds),
    ]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=170, check=True)
    return done.stdout


def _print_top(path: Path) -> None:
    stats = pstats.Stats(str(path))
    stats.strip_dirs().sort_stats(pstats.SortKey.TIME).print_stats(_LINES)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="profile a contender under load")
    parser.add_argument("--contender", choices=sorted(CONTENDERS), default="durable-timer")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of the load, after its warm-up")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep the raw profile there")
    options = parser.parse_args()
    try:
        profile(CONTENDERS[options.contender], options.seconds, options.keep)
    except (ContenderError, EmbeddedServerError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
