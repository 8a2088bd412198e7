"""Runs benchmarks and prints their figures as a table; exits with 1 if a limit is not reached.

A benchmark is a module of this folder with a function `figures()` that yields `Figure`s.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from pathlib import Path

from benchmarks import Figure
from mixfleet.errors import unknown

BENCHMARKS = sorted(path.stem for path in Path(__file__).parent.glob("*.py")
                    if not path.stem.startswith("_") and "def figures(" in path.read_text(encoding="utf-8"))


def main(names: list[str]) -> int:
    for name in names:
        if name not in BENCHMARKS:
            print(f"error: {unknown('benchmark', name, BENCHMARKS)}", file=sys.stderr)
            return 2
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}\n")
    print("| what | measured | limit | reached |\n| --- | --- | --- | --- |", flush=True)
    failed = False
    for name in names or BENCHMARKS:
        for figure in importlib.import_module(f"benchmarks.{name}").figures():
            failed |= figure.reached is False
            print(f"| {figure.what} | {figure.value} | {figure.bound} | {_word(figure)} |", flush=True)
    return int(failed)


def _word(figure: Figure) -> str:
    return {True: "yes", False: "**no**", None: ""}[figure.reached]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
