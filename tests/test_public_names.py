"""The public surface is exactly what is listed, for people and for type checkers alike."""

import ast
from pathlib import Path

import pytest

import mixfleet

PUBLIC = [
    "Cluster", "Data", "Device", "InputError", "Job", "Link", "Model", "Node", "Optimizer", "Pipeline", "Plan",
    "Prediction", "Program", "RunError", "SearchResult", "Sharding", "Span", "Stage", "Trace", "build", "compare",
    "device_named", "discover", "find", "lower", "predict", "profile_job", "read_trace", "train", "why_not",
    "write_trace"]


def test_names_are_exactly_those_listed():
    assert sorted(mixfleet.__all__) == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(mixfleet))


@pytest.mark.parametrize("name", PUBLIC)
def test_each_name_resolves_and_is_documented(name):
    thing = getattr(mixfleet, name)
    assert thing.__doc__, f"{name} has no docstring"


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(mixfleet.__file__).read_text(encoding="utf-8"))
    guarded = next(n for n in tree.body if isinstance(n, ast.If))
    seen = {f"{node.module}:{alias.name}" for node in guarded.body if isinstance(node, ast.ImportFrom)
            for alias in node.names}
    assert seen == {f"mixfleet.{module}:{name}" for name, module in mixfleet._MODULES.items()}


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mixfleet.nothing
