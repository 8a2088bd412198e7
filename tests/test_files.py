"""YAML files: places in errors, formats, atomic writes, kept comments."""

from typing import Literal

import msgspec
import pytest

from mixfleet.errors import InputError
from mixfleet.files import decode, read_spec, read_yaml, write_yaml


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    rate: float
    tags: dict[str, int] = {}


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    items: list[str | Inner]
    pair: tuple[int, int] = (1, 2)


@pytest.fixture
def write(tmp_path):
    def write(text, name="f.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path
    return write


def test_plain_data_and_lines(write):
    doc = read_yaml(write("a: 1\nb:\n  - x\n  - {c: 2.5, d: yes}\n3: null\n"))
    assert doc.data == {"a": 1, "b": ["x", {"c": 2.5, "d": "yes"}], "3": None}
    assert all(type(v) in (int, float, str, list, dict) for v in (doc.data["a"], doc.data["b"], doc.data["b"][1]["c"]))
    assert doc.where(("b", 1, "c")).endswith("f.yaml:4: b[1].c")
    assert doc.where(("b", 1, "gone")).endswith("f.yaml:4: b[1].gone")
    assert doc.where().endswith("f.yaml")


@pytest.mark.parametrize(("text", "says"), [
    ("a: [1, 2\nb: 3\n", r"f\.yaml:2: not valid YAML"),
    ("a: 1\na: 2\n", r"f\.yaml:2: not valid YAML: found duplicate key"),
    ("- 1\n- 2\n", r"f\.yaml: the file holds a list"),
    ("", r"f\.yaml: the file holds nothing"),
    ("just text", r"f\.yaml: the file holds the text 'just text'"),
    ("a: 1\nb: !!python/name:os.system x\n", r"f\.yaml:2: b: the tag .* is not allowed"),
    ("a: 1\n\tb: 2\n", r"f\.yaml:2: not valid YAML"),
    ("a: !!int x\n", r"f\.yaml: not valid YAML: invalid literal"),
    ("a: " + "[" * 600, r"f\.yaml: nested too deeply"),
])
def test_bad_yaml_names_the_line(write, text, says):
    with pytest.raises(InputError, match=says):
        read_yaml(write(text))


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match=r"gone\.yaml: cannot be read: No such file"):
        read_yaml(tmp_path / "gone.yaml")
    (tmp_path / "b.yaml").write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(InputError, match=r"b\.yaml: is not a text file"):
        read_yaml(tmp_path / "b.yaml")


@pytest.mark.parametrize(("text", "says"), [
    ("x: 1\n", r"f\.yaml: no format given; a plan file starts with 'mixfleet: plan/1'"),
    ("x: 1\nmixfleet: job/1\n", r"f\.yaml:2: mixfleet: this is 'job/1'; a plan file"),
    ("mixfleet: plan/9\n", r"f\.yaml:1: mixfleet: format 'plan/9' is not known"),
])
def test_the_format_is_checked(write, text, says):
    with pytest.raises(InputError, match=says):
        read_spec(write(text), "plan")


@pytest.mark.parametrize(("text", "says"), [
    ("items:\n  - x\n  - {rate: 1, tag: 3}\n", r"f\.yaml:3: items\[1\]\.tag: unknown key 'tag'; did you mean 'tags'\?"),
    ("items: []\n\npare: [1, 2]\n", r"f\.yaml:3: pare: unknown key 'pare'; did you mean 'pair'\?"),
    ("items:\n  - {tags: {a: 1}}\n", r"f\.yaml:2: items\[0\]: 'rate' is missing"),
    ("items:\n  - rate: 1\n    tags: {a: b}\n", r"f\.yaml:3: items\[0\]\.tags: must be whole number, not text"),
    ("items: 3\n", r"f\.yaml:1: items: must be list, not whole number"),
    ("items: []\npair: [1, x]\n", r"f\.yaml:2: pair\[1\]: must be whole number, not text"),
    ("pair: [1, 2]\n", r"f\.yaml: 'items' is missing"),
])
def test_what_does_not_fit_names_the_key(write, text, says):
    with pytest.raises(InputError, match=says):
        decode(read_yaml(write(text)), Outer)


def test_a_wrong_name_in_a_list_is_called_after_its_key(write):
    class Named(msgspec.Struct):
        away: tuple[Literal["weights", "gradients"], ...]

    with pytest.raises(InputError, match=r"f\.yaml:1: away\[1\]: unknown away 'gradient'; did you mean 'gradients'\?"):
        decode(read_yaml(write("away: [weights, gradient]\n")), Named)


def test_decoding_gives_the_struct(write):
    doc = read_yaml(write("items: [x, {rate: 2}]\npair: [3, 4]\n"))
    assert decode(doc, Outer) == Outer(items=["x", Inner(rate=2.0)], pair=(3, 4))


def test_a_written_file_reads_back_and_short_things_are_on_one_line(tmp_path):
    data = {"a": {"x": 1, "y": [1, 2]}, "long": [f"{i:040d}" for i in range(4)], "t": ("u", 1e-9), "none": None}
    write_yaml(tmp_path / "f.yaml", data, header="made by a test")
    text = (tmp_path / "f.yaml").read_text()
    assert text.startswith("# made by a test\na: {x: 1, y: [1, 2]}\nlong:\n  - '000")
    assert read_yaml(tmp_path / "f.yaml").data == {**data, "t": ["u", 1e-9]}


@pytest.mark.parametrize("text", [": 0", "::", "?x", "? x", "-", "- a", "a: b", "a #b", "[x", "0 :0", "'", '"a": b'])
def test_any_text_can_be_a_name(tmp_path, text):
    data = {"flow": {"n": text, "list": [text, 1]}, "block": text, text: 2}
    write_yaml(tmp_path / "f.yaml", data)
    assert read_yaml(tmp_path / "f.yaml").data == data


def test_comments_of_a_person_stay_with_their_keys(write):
    path = write("# top\na: 1  # about a\nlist:\n  - {n: x, v: 1}  # first\n  - {n: y, v: 2}\ngone: 3\n")
    write_yaml(path, {"a": 7, "list": [{"n": "x", "v": 9}], "new": "z"}, header="not wanted")
    text = path.read_text()
    assert read_yaml(path).data == {"a": 7, "list": [{"n": "x", "v": 9}], "new": "z"}
    assert all(comment in text for comment in ("# top", "# about a", "# first"))
    assert "not wanted" not in text


def test_a_failed_write_leaves_the_old_file_alone(write, monkeypatch):
    path = write("a: 1\n")

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(InputError, match="cannot be written: No space left"):
        write_yaml(path, {"a": 2})
    assert path.read_text() == "a: 1\n"
    assert list(path.parent.iterdir()) == [path]


def test_folders_are_made_and_a_file_in_their_place_is_the_users_error(write, tmp_path):
    write_yaml(tmp_path / "new" / "f.yaml", {"a": 2})
    assert read_yaml(tmp_path / "new" / "f.yaml").data == {"a": 2}
    with pytest.raises(InputError, match="cannot be written"):
        write_yaml(write("x: 1\n") / "f.yaml", {"a": 2})
