"""YAML in and out: every error says file, line and key; writes are atomic and keep a person's comments.

The first key of every file of ours is `mixfleet: <kind>/<version>`, such as `mixfleet: cluster/1`.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mixfleet.errors import InputError, unknown

FORMAT_KEY = "mixfleet"
VERSIONS = {"cluster": 1, "device": 1, "job": 1, "plan": 1}

_FLOW_WIDTH = 120
"""Longest list or mapping, without quotes, that is written on one line."""

Keys = tuple[str | int, ...]
T = TypeVar("T")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[\.\.\.\]")


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file: plain `data` (dicts, lists, text, numbers), and the line of every key."""

    path: str
    data: dict[str, Any]
    lines: dict[Keys, int] = field(default_factory=dict)

    def where(self, keys: Keys = ()) -> str:
        """`lab.yaml:12: nodes[0].nic`; the nearest enclosing key where `keys` is not in the file."""
        known = next((keys[:n] for n in range(len(keys), 0, -1) if keys[:n] in self.lines), ())
        line = f":{self.lines[known]}" if known else ""
        return f"{self.path}{line}" + (f": {show_keys(keys)}" if keys else "")


def show_keys(keys: Keys) -> str:
    """`("nodes", 0, "nic")` as `nodes[0].nic`."""
    return "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in keys).lstrip(".")


def read_yaml(path: str | Path) -> Document:
    """The file as plain data. The top level must be a mapping; tags and duplicate keys are refused."""
    tree = _load(Path(path))
    if not isinstance(tree, dict):
        raise InputError(f"the file holds {_kind_of(tree)}; it must be a mapping of keys to values", where=str(path))
    lines: dict[Keys, int] = {}
    data = _plain(tree, (), lines, str(path))
    return Document(str(path), data, lines)


def read_spec(path: str | Path, kind: str) -> Document:
    """`read_yaml`, with the format key checked against `kind` and taken out."""
    doc = read_yaml(path)
    want = f"{kind}/{VERSIONS[kind]}"
    found = doc.data.pop(FORMAT_KEY, None)
    if found is None:
        raise InputError(f"no format given; a {kind} file starts with '{FORMAT_KEY}: {want}'", where=doc.where())
    if str(found).split("/")[0] != kind:
        raise InputError(f"this is {found!r}; a {kind} file ({want!r}) is needed here", where=doc.where((FORMAT_KEY,)))
    if found != want:
        raise InputError(f"format {found!r} is not known to this version of mixfleet, which reads {want!r}",
                         where=doc.where((FORMAT_KEY,)))
    return doc


def decode(doc: Document, into: type[T], hook: Callable[[type, Any], Any] | None = None) -> T:
    """`doc.data` as a msgspec struct. Wrong types, unknown keys and failed checks raise InputError with their place."""
    try:
        return msgspec.convert(doc.data, into, dec_hook=hook)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        keys: Keys = tuple(m[1] if m[1] else int(m[2]) for m in _STEP.finditer(path.rstrip("`")) if m[1] or m[2])
        types = _types_at(into, keys)
        extra = re.match(r"Object contains unknown field `(.*)`$", message)
        if extra:
            known = [f.encode_name for t in types if isinstance(t, msgspec.inspect.StructType) for f in t.fields]
            raise unknown("key", extra[1], known, where=doc.where((*keys, extra[1]))) from None
        choice = re.match(r"Invalid enum value '?(.*?)'?$", message)
        if choice:
            allowed = [str(v) for t in types if isinstance(t, msgspec.inspect.LiteralType) for v in t.values]
            name = next((key for key in reversed(keys) if isinstance(key, str)), "value")  # not the place in a list
            raise unknown(name, choice[1], allowed, where=doc.where(keys)) from None
        missing = re.match(r"Object missing required field `(.*)`$", message)
        if missing:
            message = f"{missing[1]!r} is missing"
        raise InputError(_reworded(message), where=doc.where(keys)) from None


def write_yaml(path: str | Path, data: dict[str, Any], header: str = "") -> None:
    """Write `data` so that a reader sees the old file or the whole new one, never a part.

    Lists and mappings that fit on a line are written on one. If the file exists already, comments in it stay with
    their keys; otherwise `header` becomes the comment at its top.
    """
    from ruamel.yaml import YAML

    path = Path(path)
    yaml = YAML()
    yaml.width = 2 * _FLOW_WIDTH
    yaml.indent(mapping=2, sequence=4, offset=2)
    tree = _styled(data)
    if path.exists() and path.stat().st_size:
        old = _load(path)
        tree = _merged(old, tree) if isinstance(old, dict) else tree
    elif header:
        tree.yaml_set_start_comment(header)
    text = StringIO()
    yaml.dump(tree, text)
    write_text(path, text.getvalue())


def write_text(path: str | Path, text: str) -> None:
    """Write a file that a reader sees whole or not at all; folders are made where they are missing."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise InputError(f"cannot be written: {error.strerror}", where=str(path)) from None


def _load(path: Path) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except UnicodeDecodeError:
        raise InputError("is not a text file (UTF-8)", where=str(path)) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReusedAnchorWarning)
            return YAML().load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        problem = " ".join(str(error.problem or error.context).split())
        raise InputError(f"not valid YAML: {problem}", where=f"{path}{line}") from None
    except RecursionError:
        raise InputError("nested too deeply", where=str(path)) from None
    except (YAMLError, ValueError, TypeError, LookupError) as error:  # a tag on a wrong value, a mapping as a key
        raise InputError(f"not valid YAML: {' '.join(str(error).split())}", where=str(path)) from None


def _plain(tree: Any, at: Keys, lines: dict[Keys, int], path: str) -> Any:
    """Without ruamel's types; records the line of every key on the way."""
    from ruamel.yaml.comments import TaggedScalar

    if isinstance(tree, (dict, list)):
        entries: Iterator[tuple[Any, Any]] = iter(tree.items() if isinstance(tree, dict) else enumerate(tree))
        for key, _ in entries:
            mark = tree.lc.key(key) if isinstance(tree, dict) else tree.lc.item(key)  # type: ignore[attr-defined]
            lines[(*at, key if isinstance(tree, list) else str(key))] = mark[0] + 1
        if isinstance(tree, list):
            return [_plain(v, (*at, i), lines, path) for i, v in enumerate(tree)]
        return {str(k): _plain(v, (*at, str(k)), lines, path) for k, v in tree.items()}
    if isinstance(tree, TaggedScalar):
        raise InputError(f"the tag {tree.tag.value!r} is not allowed", where=Document(path, {}, lines).where(at))
    if tree is None or isinstance(tree, bool):
        return tree
    return int(tree) if isinstance(tree, int) else float(tree) if isinstance(tree, float) else str(tree)


def _kind_of(tree: Any) -> str:
    return "nothing" if tree is None else "a list" if isinstance(tree, list) else f"the text {str(tree)[:40]!r}"


def _reworded(message: str) -> str:
    """msgspec's type names in the words of a YAML file."""
    words = {"object": "mapping", "array": "list", "str": "text", "int": "whole number", "float": "number",
             "null": "nothing", "bool": "true or false"}

    def names(match: re.Match[str]) -> str:
        return " or ".join(words.get(n.strip(), n.strip()) for n in match[1].split("|"))

    return re.sub(r"^Expected `([^`]+)`, got `([^`]+)`",
                  lambda m: f"must be {names(m)}, not {words.get(m[2], m[2])}", message)


def _types_at(into: Any, keys: Keys) -> list[Any]:
    """The types that a value at `keys` may have."""
    found = [msgspec.inspect.type_info(into)]
    for key in keys:
        found = [inner for t in _alternatives(found) for inner in _inside(t, key)]
    return list(_alternatives(found))


def _alternatives(types: list[Any]) -> Iterator[Any]:
    for t in types:
        yield from t.types if isinstance(t, msgspec.inspect.UnionType) else (t,)


def _inside(t: Any, key: str | int) -> Iterator[Any]:
    if isinstance(t, msgspec.inspect.StructType):
        yield from (f.type for f in t.fields if f.encode_name == key)
    elif isinstance(t, (msgspec.inspect.ListType, msgspec.inspect.VarTupleType)):
        yield t.item_type
    elif isinstance(t, msgspec.inspect.TupleType) and isinstance(key, int):
        yield t.item_types[key]
    elif isinstance(t, msgspec.inspect.DictType):
        yield t.value_type


def _styled(data: Any) -> Any:
    """ruamel's containers, on one line where that is short."""
    from ruamel.yaml.comments import CommentedMap, CommentedSeq
    from ruamel.yaml.scalarstring import SingleQuotedScalarString

    tree: Any
    if isinstance(data, str) and data.startswith((":", "?")):
        return SingleQuotedScalarString(data)  # ruamel writes `[: 0]` and `[?x]`, which it cannot read
    if isinstance(data, Mapping):
        tree = CommentedMap({_styled(k): _styled(v) for k, v in data.items()})
    elif isinstance(data, (list, tuple)):
        tree = CommentedSeq(map(_styled, data))
    else:
        return data
    if len(str(data).replace("'", "")) <= _FLOW_WIDTH and _depth(data) <= 2:
        tree.fa.set_flow_style()
    else:
        tree.fa.set_block_style()
    return tree


def _depth(data: Any) -> int:
    if isinstance(data, Mapping):
        return 1 + max(map(_depth, data.values()), default=0)
    return 1 + max(map(_depth, data), default=0) if isinstance(data, (list, tuple)) else 0


def _merged(old: Any, new: Any) -> Any:
    """`old`, with its comments, changed in place to hold what `new` holds."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [k for k in old if k not in new]:
            del old[key]
        for key, value in new.items():
            old[key] = _merged(old.get(key), value)
        return old
    if isinstance(old, list) and isinstance(new, list):
        del old[len(new):]
        for i, value in enumerate(new):
            if i < len(old):
                old[i] = _merged(old[i], value)
            else:
                old.append(value)
        return old
    return new
