"""Imports run one way, and planning never imports torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mixfleet

ROOT = Path(mixfleet.__file__).parent
BASE = {"errors", "units", "spec", "files"}
MAY_IMPORT = {  # the table of docs/architecture.md; a room may also import what the rooms it names may
    "errors": set(), "units": {"errors"}, "spec": {"errors"}, "files": {"errors"},
    "catalog": BASE,
    "cluster": {"catalog"} | BASE, "cluster_file": {"cluster"},
    "model": {"catalog"} | BASE,
    "job": {"model"},
    "samples": {"job"},
    "schedule": {"errors"},
    "plan": {"cluster", "job", "schedule"},
    "plan_rules": {"plan"}, "program": {"plan_rules"},
    "cost": {"cluster", "job"},
    "batching": {"plan", "cost", "samples"},
    "trace": {"units", "spec"},
    "sim": {"program", "cost", "batching", "trace"},
    "search": {"sim"},
    "run": {"program", "cost", "batching", "trace"},
    "calibrate": {"cluster_file", "cost", "run", "sim"},
    "testbed": {"search", "run", "calibrate"},
    "report": {"trace", "plan"},
}
CYCLES = {("cluster", "cluster_file")}
"""`Cluster.load` reaches its YAML form inside the function."""
TORCH_ROOMS = {"run", "calibrate"}
TORCH = ("torch", "safetensors", "transformers", "psutil")


def room_of(module: str) -> str:
    return module.removeprefix("mixfleet.").split(".")[0]


def allowed(room: str) -> set[str]:
    seen, left = {room}, [room]
    while left:
        for other in MAY_IMPORT[left.pop()] - seen:
            seen.add(other)
            left.append(other)
    return seen


def imports(tree: ast.AST) -> set[str]:
    """Modules imported anywhere in the file, also inside functions; what only type checkers see does not count."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{a.name}" if node.module == "mixfleet" else str(node.module) for a in node.names}
        found |= imports(node)
    return found


FILES = sorted(p for p in ROOT.rglob("*.py") if p.parent != ROOT or p.stem not in ("__init__", "__main__"))


def test_every_room_is_in_the_table():
    rooms = {p.relative_to(ROOT).parts[0].removesuffix(".py") for p in FILES}
    assert rooms == set(MAY_IMPORT) | {"cli"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way(path):
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    found = imports(ast.parse(path.read_text(encoding="utf-8")))
    rooms = {room_of(m) for m in found if m.startswith("mixfleet.")}
    if room != "cli":
        upward = {r for r in rooms - allowed(room) if (room, r) not in CYCLES}
        assert not upward, f"{room} imports {upward}"
    if room not in TORCH_ROOMS:
        assert not {m for m in found if m.split(".")[0] in TORCH}


def test_the_table_has_no_cycle():
    for room in MAY_IMPORT:
        assert all(room not in allowed(other) for other in MAY_IMPORT[room])


PLAN = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Blocked())
import mixfleet, mixfleet.cli, mixfleet.search, mixfleet.sim, mixfleet.cost, mixfleet.report.html
from mixfleet import Cluster, Job, find, predict
cluster = Cluster.load("examples/clusters/laptop.yaml")
job = Job.load("examples/jobs/gpt-tiny.yaml")
best = find(job, cluster).best
assert best is not None and predict(best.plan, job, cluster).step_s > 0
"""


def test_planning_works_without_torch():
    root = Path(__file__).parent.parent
    run = subprocess.run([sys.executable, "-c", PLAN.format(blocked=TORCH)], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_importing_mixfleet_loads_little():
    heavy = {"numpy", "torch", "rich", "jinja2", "ruamel.yaml"}
    code = f"import sys, mixfleet, mixfleet.cli; print(sorted({heavy!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
