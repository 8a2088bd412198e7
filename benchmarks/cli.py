"""The command line starts quickly, and importing mixfleet imports nothing heavy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

from benchmarks import Figure

HELP_LIMIT_S = 0.3
RUNS = 10


def cpu_s(*command: str) -> float:
    """CPU seconds, user and system, of a command; the least of `RUNS`, since noise only adds."""
    def once() -> float:
        before = os.times()
        subprocess.run(command, check=True, capture_output=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    return min(once() for _ in range(RUNS))


def figures() -> Iterator[Figure]:
    help_s = cpu_s(sys.executable, "-m", "mixfleet", "--help")
    yield Figure("CPU time of `mixfleet --help`", f"{help_s:.2f} s", f"< {HELP_LIMIT_S} s", help_s < HELP_LIMIT_S)
    empty_s, import_s = cpu_s(sys.executable, "-c", ""), cpu_s(sys.executable, "-c", "import mixfleet")
    yield Figure("CPU time of `import mixfleet`", f"{import_s - empty_s:.3f} s above Python's own {empty_s:.3f} s")
