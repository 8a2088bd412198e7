"""README and docs are executed: commands parse and run, figures are current, files load, links lead somewhere.

`python tests/test_docs.py` (or `make docs`) writes current output below the commands of the README.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import pytest

from mixfleet import cli

ROOT = Path(__file__).resolve().parent.parent
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REPEATABLE = ("show", "predict", "plan")
"""Commands whose output is the same on every machine, as long as their files are."""
MEASURED = "out/here.yaml", "out/tiny-plan.yaml"
"""What comes from measuring this machine is not."""
UNRUN = {
    "docs/checkpoints.md": "needs a checkpoint of a finished run; tests/test_checkpoint.py runs these calls",
}
"""Python blocks that are not run, and why."""


def blocks(path: Path, language: str) -> list[str]:
    return [body for found, body in BLOCK.findall(path.read_text(encoding="utf-8")) if found == language]


def sections(body: str) -> list[tuple[str, list[str]]]:
    """The commands of a console block, each with the lines that it shows."""
    parts = [part.splitlines() for part in re.split(r"^(?=\$ )", body, flags=re.MULTILINE) if part]
    return [(lines[0][2:], lines[1:]) for lines in parts]


def mentioned() -> list[str]:
    """Every mixfleet command of the docs: of console blocks, and in backticks with arguments."""
    found = [command for path in DOCS for body in blocks(path, "console") for command, _ in sections(body)]
    for path in DOCS:
        found += re.findall(r"`(mixfleet \w+(?: [^`]*)?)`", path.read_text(encoding="utf-8"))
    return sorted({c for c in found if c.startswith("mixfleet ")})


@pytest.mark.parametrize("line", mentioned())
def test_commands_name_real_verbs_and_options(line):
    _, verb, *arguments = shlex.split(line)
    if verb.startswith("-"):
        assert verb in ("--help", "--version")
        return
    command = cli.cli.commands[verb]
    if isinstance(command, click.Group) and arguments:
        command = command.commands[arguments[0]]
    known = {name for p in command.params if isinstance(p, click.Option) for name in (*p.opts, *p.secondary_opts)}
    assert {a for a in arguments if a.startswith("-")} <= known


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_make_targets_exist(path):
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for words in re.findall(r"(?:^|`)make ((?:[\w-]+ ?)+)", text, re.MULTILINE):
        for target in words.split("  ")[0].split():
            assert target in targets, f"make {target}"


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
        if "://" not in link:
            assert (path.parent / link).exists(), link


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_files_in_docs_load(path, tmp_path, capsys):
    for number, body in enumerate(blocks(path, "yaml")):
        if body.startswith("mixfleet: "):
            file = tmp_path / f"{number}.yaml"
            file.write_text(body)
            assert cli.main(["show", str(file)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("path", [p for p in DOCS if blocks(p, "python")], ids=lambda p: p.name)
def test_python_in_docs_runs(path):
    if str(path.relative_to(ROOT)) in UNRUN:
        pytest.skip(UNRUN[str(path.relative_to(ROOT))])
    for body in blocks(path, "python"):
        done = subprocess.run([sys.executable, "-c", body], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def played(path: Path) -> str:
    """The document with the output that its commands have now, each run in one folder in order.

    Where the output shown ends with a line of three dots, it stays as long as it is.
    """
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        (Path(folder) / "out").mkdir()

        def output(command: str, shown: list[str]) -> str:
            words = shlex.split(command)
            assert words[0] == "mixfleet", f"{command}: only mixfleet commands are run"
            if "--ranks" in words:  # the cores that this machine has
                words[words.index("--ranks") + 1] = f"{cores[0]} {cores[-1]} {cores[-1]}"
            done = subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}\n{done.stderr}"
            lines = [line.rstrip() for line in done.stdout.splitlines()]
            if shown[-1:] == ["..."]:
                lines = [*lines[:len(shown) - 1], "..."]
            return "".join(f"{line}\n" for line in (f"$ {command}", *lines))

        def replay(match: re.Match[str]) -> str:
            if match[1] != "console":
                return match[0]
            return f"```console\n{''.join(output(*section) for section in sections(match[2]))}```"

        return BLOCK.sub(replay, path.read_text(encoding="utf-8"))


def repeatable(text: str) -> list[tuple[str, list[str]]]:
    """Command and output of those commands whose output is the same everywhere."""
    return [(command, lines) for found, body in BLOCK.findall(text) if found == "console"
            for command, lines in sections(body)
            if command.split()[1] in REPEATABLE and not any(name in command for name in MEASURED)]


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in DOCS if blocks(p, "console")], ids=lambda p: p.name)
def test_commands_run_and_print_what_the_docs_show(path):
    shown, now = repeatable(path.read_text(encoding="utf-8")), repeatable(played(path))
    assert shown == now, "the output has changed; `make docs` writes it anew"


if __name__ == "__main__":
    for document in DOCS:
        if blocks(document, "console"):
            document.write_text(played(document), encoding="utf-8")
