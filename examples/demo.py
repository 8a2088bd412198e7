"""The demo behind `make demo`: plan a mixed lab, then plan, train and check a small model on this machine.

It only runs the commands that it prints; everything it writes goes to `out/`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = Path("out")
LAB_JOB, LAB = "examples/jobs/llama-3-8b.yaml", "examples/clusters/mixed-lab.yaml"
TINY = "examples/jobs/gpt-tiny.yaml"


def say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def mixfleet(*arguments: str) -> None:
    print(f"\n$ mixfleet {shlex.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "mixfleet", *arguments], cwd=ROOT, check=True)


def uneven_ranks() -> str:
    """Three processes: one has a core to itself, two share the next one; on a single core all three share it."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        print("This machine has one core, so the three processes share it equally.", flush=True)
    return f"{cores[0]} {cores[-1]} {cores[-1]}"


def main() -> int:
    shutil.rmtree(ROOT / OUT / "run", ignore_errors=True)
    say("1. Llama-3-8B on a lab with eight A100s, sixteen V100s and four RTX 4090s: which plan is best?")
    mixfleet("plan", LAB_JOB, LAB, "-o", str(OUT / "lab-plan.yaml"), "--html", str(OUT / "lab.html"))

    say("2. This machine as a mixed cluster of three processes. What is it made of?")
    mixfleet("discover", "--ranks", uneven_ranks(), "--profile", TINY, "-o", str(OUT / "here.yaml"))

    say("3. A small GPT on it: which plan is best?")
    mixfleet("plan", TINY, str(OUT / "here.yaml"), "-o", str(OUT / "tiny-plan.yaml"))

    say("4. Train by that plan, for real.")
    mixfleet("train", str(OUT / "tiny-plan.yaml"), "--out", str(OUT / "run"), "--trace")

    say("5. Was the prediction right?")
    mixfleet("compare", str(OUT / "run"), "--html", str(OUT / "compare.html"))

    say(f"Open {OUT}/lab.html and {OUT}/compare.html in a browser; {OUT}/run/measured.json opens in Perfetto.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as failed:
        sys.exit(failed.returncode)
    except KeyboardInterrupt:
        sys.exit(130)
