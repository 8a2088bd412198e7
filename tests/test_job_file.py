"""Job and plan files."""

import json
from pathlib import Path

import pytest

from mixfleet.errors import InputError
from mixfleet.job import Data, Job, Optimizer
from mixfleet.plan import Pipeline, Plan, Sharding, Stage

EXAMPLES = sorted((Path(__file__).parent.parent / "examples" / "jobs").glob("*.yaml"))
MODEL = "model: {layers: 2, hidden: 24, heads: 3, vocab: 17, max_seq_len: 40}"
TINY = """\
mixfleet: job/1
model: {layers: 2, hidden: 24, heads: 3, vocab: 17, max_seq_len: 40}
seq_len: 20
global_batch: 6
precision: fp32
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
data: {kind: text, path: corpus}
"""
TWO_STAGES = Plan(
    name="two", job="job.yaml", cluster="lab.yaml", cluster_fingerprint="abc", schedule="gpipe",
    sharding=Sharding(weights=3, gradients=2, optimizer=5, prefetch=2),
    pipelines=(
        Pipeline(stages=(Stage(blocks=(0, 3), devices=(0, 1, 2, 3, 9, 4, 5, 17), tensor=4, recompute="full"),
                         Stage(blocks=(3, 7), devices=tuple(range(100, 108)), tensor=4)),
                 samples=5, micro_batch=2, replicas=2),
        Pipeline(stages=(Stage(blocks=(0, 7), devices=(20,)),), samples=3, micro_batch=3)))


@pytest.fixture
def write(tmp_path):
    def write(text, name="f.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path
    return write


def test_a_job_file_becomes_a_job(write, tmp_path):
    job = Job.load(write(TINY, "tiny.yaml"))
    assert job.name == "tiny"
    assert (job.model.layers, job.model.hidden, job.seq_len, job.global_batch) == (2, 24, 20, 6)
    assert job.optimizer == Optimizer(name="sgd", lr=0.1, momentum=0.9)
    assert job.data == Data(kind="text", path=str(tmp_path / "corpus"))  # relative to the job file


def test_a_model_may_be_a_name_or_a_config_next_to_the_job(write):
    assert Job.load(write(TINY.replace(MODEL,
                                       "model: gpt2"))).model.count == 124_439_808
    write(json.dumps({"model_type": "gpt2", "n_embd": 24, "n_layer": 3, "n_head": 2, "n_positions": 32,
                      "vocab_size": 50}), "config.json")
    job = Job.load(write(TINY.replace(MODEL,
                                      "model: config.json")))
    assert (job.model.family, job.model.layers, job.model.vocab) == ("gpt2", 3, 50)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_load_and_survive_saving(path, tmp_path):
    job = Job.load(path)
    job.save(tmp_path / "again.yaml")
    assert Job.load(tmp_path / "again.yaml") == job
    assert job.name == path.stem


def test_saving_keeps_the_data_path_where_it_points(write, tmp_path):
    job = Job.load(write(TINY))
    (tmp_path / "deep").mkdir()
    job.save(tmp_path / "deep" / "g.yaml")
    again = Job.load(tmp_path / "deep" / "g.yaml")
    assert Path(again.data.path).resolve() == tmp_path / "corpus"
    assert again.model == job.model


@pytest.mark.parametrize(("old", "new", "says"), [
    ("seq_len: 20", "seq_len: -20", r"f\.yaml: seq_len is -20; it must be positive"),
    ("seq_len: 20", "seq_len: 80", r"f\.yaml: seq_len is 80; .* allows at most 40"),
    ("seq_len: 20", "seqlen: 20", r"f\.yaml:3: seqlen: unknown key 'seqlen'; did you mean .*'seq_len'"),
    ("global_batch: 6\n", "", r"f\.yaml: 'global_batch' is missing"),
    ("lr: 0.1", "lr: 0", r"f\.yaml:6: optimizer: optimizer\.lr is 0\.0; it must be positive"),
    ("lr: 0.1", "lr: fast", r"f\.yaml:6: optimizer\.lr: must be number, not text"),
    ("lr: 0.1", "learning_rate: 0.1", r"f\.yaml:6: optimizer\.learning_rate: unknown key"),
    ("precision: fp32", "precision: fp23", r"f\.yaml:5: precision: unknown precision 'fp23'; did you mean .*'fp32'"),
    ("heads: 3", "heads: 5", r"f\.yaml:2: model: "),
    (MODEL, "model: llama-3-9b",
     r"f\.yaml:2: model: unknown model 'llama-3-9b'; did you mean .*llama-3-8b"),
    (MODEL, "model: 3", r"f\.yaml:2: model: give a "),
    (MODEL + "\n", "", r"f\.yaml: model: give a well-known"),
])
def test_what_is_wrong_in_a_job_is_named_with_its_place(write, old, new, says):
    assert old in TINY
    with pytest.raises(InputError, match=says):
        Job.load(write(TINY.replace(old, new)))


def test_a_plan_survives_saving_and_reads_well(tmp_path):
    TWO_STAGES.save(tmp_path / "p.yaml")
    assert Plan.load(tmp_path / "p.yaml") == TWO_STAGES
    text = (tmp_path / "p.yaml").read_text()
    assert text.startswith("mixfleet: plan/1\nname: two\njob: job.yaml\n")
    assert "devices: [0-3, 9, 4, 5, 17]" in text
    assert "devices: [100-107]" in text


def test_a_person_may_write_ranges_in_a_plan(write):
    plan = Plan.load(write("mixfleet: plan/1\npipelines:\n  - stages:\n      - {blocks: [0, 4], devices: 2-4}\n"
                           "    samples: 3\n    micro_batch: 1\n    replicas: 3\n"))
    assert plan.pipelines[0].stages[0].devices == (2, 3, 4)


@pytest.mark.parametrize(("old", "new", "says"), [
    ("[100-107]", "[107-100]", r"f\.yaml:\d+: pipelines\[0\]\.stages\[1\]\.devices: the range '107-100' runs"),
    ("[100-107]", "[a-b]", r"f\.yaml:\d+: pipelines\[0\]\.stages\[1\]\.devices\[0\]: must be whole number, not text"),
    ("recompute: full", "recompte: full", r"pipelines\[0\]\.stages\[0\]\.recompte: unknown key .*'recompute'"),
    ("schedule: gpipe", "schedule: gpip", r"f\.yaml:\d+: schedule: unknown schedule 'gpip'; did you mean .*'gpipe'"),
    ("    micro_batch: 3\n", "", r"f\.yaml:\d+: pipelines\[1\]: 'micro_batch' is missing"),
])
def test_what_is_wrong_in_a_plan_is_named_with_its_place(tmp_path, write, old, new, says):
    TWO_STAGES.save(tmp_path / "good.yaml")
    text = (tmp_path / "good.yaml").read_text()
    assert old in text
    with pytest.raises(InputError, match=says):
        Plan.load(write(text.replace(old, new)))
