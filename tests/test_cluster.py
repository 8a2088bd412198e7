"""Clusters: the file form, errors with their place, round trips, paths between devices."""

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mixfleet.cluster import DTYPES, BlockTime, Cluster, Device, Link, Node, device_named
from mixfleet.errors import InputError

EXAMPLES = sorted((Path(__file__).parent.parent / "examples" / "clusters").glob("*.yaml"))
LAB = """\
mixfleet: cluster/1
name: lab
nodes:
  - name: a
    devices: {device: A100-SXM4-80GB, count: 2}
    nic: {bandwidth: 200 Gb/s, latency: 5 us}
    rack: r1
  - name: b
    count: 2
    devices:
      - RTX4090
      - {device: RTX4090, flops: {bf16: 120 TFLOP/s}, power: 300, price_per_hour: 0.35}
    nic: 25 Gb/s
    rack: r2
rack_uplink: {bandwidth: 50 Gb/s, latency: 3 us}
"""


@pytest.fixture
def load(tmp_path):
    def load(text):
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return Cluster.load(path)
    return load


def test_a_file_becomes_a_cluster(load):
    lab = load(LAB)
    assert [n.name for n in lab.nodes] == ["a", "b-0", "b-1"]
    assert [d.name for d in lab.devices] == ["A100-SXM4-80GB"] * 2 + ["RTX4090"] * 4
    assert lab.devices[:2] == (device_named("A100-SXM4-80GB"),) * 2
    changed = lab.devices[3]
    assert (changed.flops["bf16"], changed.flops["fp32"], changed.power_w, changed.price_per_hour) == (
        120e12, 82.6e12, 300, 0.35)
    assert lab.nodes[0].link == Link(name="nvlink", latency_s=3.4e-6, bandwidth_Bps=300e9)
    assert lab.nodes[1].link.name == "pcie"
    assert lab.nodes[1].link.bandwidth_Bps == device_named("RTX4090").pcie_Bps
    assert lab.nodes[0].nic == Link(name="nic", latency_s=5e-6, bandwidth_Bps=25e9)
    assert lab.nodes[2].nic.bandwidth_Bps == 3.125e9
    assert lab.node_of == (0, 0, 1, 1, 2, 2)


def test_a_locked_clock_is_read_and_written(load, tmp_path):
    lab = load(LAB.replace("power: 300", "clock: 0.9"))
    assert [d.clock for d in lab.devices] == [None, None, None, 0.9, None, 0.9]
    lab.save(tmp_path / "again.yaml")
    assert Cluster.load(tmp_path / "again.yaml") == lab


def test_a_path_passes_the_shared_ports_of_every_level(load):
    lab = load(LAB)
    path = lab.path(1, 4)
    assert [p.name for p in path.ports] == ["a:1:out", "a:nic:out", "rack /r1:out", "rack /r2:in", "b-1:nic:in",
                                            "b-1:0:in"]
    assert path.level == "rack"
    assert path.bandwidth_Bps == 3.125e9
    assert path.latency_s == pytest.approx(5e-6 + 7e-6 + 3e-6)
    assert lab.path(2, 4).level == "nic"  # two nodes of one rack
    assert lab.path(0, 1).level == "node"


def test_devices_as_they_are_printed(load):
    text = "mixfleet: cluster/1\nnodes:\n  - {{name: x, devices: [{}, H100-SXM], link: pcie}}\n"
    assert load(text.format("3 x RTX4090")) == load(text.format("{device: RTX4090, count: 3}"))
    for wrong, says in (("0 x RTX4090", "count is 0"), ("2 x RTX4091", "unknown device 'RTX4091'; did you mean"),
                        ("2 RTX4090", "unknown device '2 RTX4090'; did you mean")):
        with pytest.raises(InputError, match=re.escape(says)):
            load(text.format(wrong))


def test_an_instance_brings_devices_adapter_memory_and_price(load):
    cluster = load("mixfleet: cluster/1\nnodes:\n  - {name: x, count: 3, instance: P4D.24xlarge}\n")
    node = cluster.nodes[2]
    assert (node.name, len(node.devices), node.devices[5].name) == ("x-2", 8, "A100-SXM4-40GB")
    assert node.nic.bandwidth_Bps == 50e9
    assert node.host_memory_bytes == 1152 * 2**30
    assert sum(d.price_per_hour for d in node.devices) == pytest.approx(32.7726)
    assert cluster.name == "c"  # the file's


def test_nvlink_by_bridge_is_the_default_up_to_two_cards_only(load):
    text = "mixfleet: cluster/1\nnodes:\n  - {{name: x, devices: {{device: RTX3090, count: {}}}}}\n"
    assert load(text.format(2)).nodes[0].link.name == "nvlink"
    assert load(text.format(3)).nodes[0].link.name == "pcie"


def test_a_measured_matrix_replaces_the_levels(load):
    text = LAB + ("node_matrix:\n  bandwidth: [[0, 1 GB/s, 2 GB/s], [3 GB/s, 0, 4 GB/s], [5 GB/s, 6 GB/s, 0]]\n"
                  "  latency: [[0, 1 ms, 2 ms], [3 ms, 0, 4 ms], [5 ms, 6 ms, 0]]\n")
    path = load(text).path(4, 0)
    assert path.bandwidth_Bps == 3.125e9
    assert path.latency_s == 5e-3
    assert load(text).path(2, 0).bandwidth_Bps == 3e9


@pytest.mark.parametrize(("old", "new", "says"), [
    ("bandwidth: 200 Gb/s", "bandwidth: 200 GB", r"c\.yaml:6: nodes\[0\]\.nic\.bandwidth: .*write a rate"),
    ("bandwidth: 200 Gb/s", "bandwidth: -1 Gb/s", r"c\.yaml:6: nodes\[0\]\.nic\.bandwidth: is '-1 Gb/s'; it can"),
    ("bandwidth: 200 Gb/s, ", "", r"c\.yaml:6: nodes\[0\]\.nic: 'bandwidth' is missing"),
    ("bandwidth: 200 Gb/s", "bandwidth: 0", r"c\.yaml:6: nodes\[0\]\.nic: link nic: bandwidth is 0.0; it must be posi"),
    ("bandwidth: 200 Gb/s", "bandwidth: true", r"c\.yaml:6: nodes\[0\]\.nic\.bandwidth: "),
    ("latency: 5 us", "latncy: 5 us", r"c\.yaml:6: nodes\[0\]\.nic\.latncy: unknown key .*'latency'"),
    ("device: A100-SXM4-80GB", "device: A100-SXM-80GB", r"c\.yaml:5: nodes\[0\]\.devices: unknown .*A100-SXM4-80GB"),
    ("device: RTX4090, flops", "device: RTX4080, flops", r"c\.yaml:12: nodes\[1\]\.devices\[1\]: unknown device"),
    ("bf16: 120 T", "bf17: 120 T", r"c\.yaml:12: nodes\[1\]\.devices\[1\]: device RTX4090: flops has 'bf17'"),
    ("power: 300", "power: -300", r"c\.yaml:12: .*power_w is -300.0; it cannot be negative"),
    ("power: 300", "clock: 1.2", r"c\.yaml:12: .*clock is 1.2; it must be above 0 and at most 1"),
    ("power: 300", "clock: 0.9, kind: cpu", r"c\.yaml:12: .*clock is for GPUs; a part of a CPU's time is its share"),
    ("power: 300", "share: 1.5", r"c\.yaml:12: .*share is 1.5; it must be above 0 and at most 1"),
    ("count: 2}", "count: 0}", r"c\.yaml:5: nodes\[0\]\.devices: count is 0; it must be 1 to 1,000,000"),
    ("count: 2}", "count: 100000000000000000000}", r"c\.yaml:5: nodes\[0\]\.devices: count is 1000.*it must be 1 to"),
    ("    count: 2\n", "    count: 300000000\n", r"c\.yaml:8: nodes\[1\]: 300,000,000 nodes of 2 devices"),
    ("    count: 2\n", "    count: -2\n", r"c\.yaml:9: nodes\[1\]\.count: count is -2; it must be at least 1"),
    ("    nic: 25 Gb/s\n", "", r"c\.yaml:8: nodes\[1\]\.nic: node b has no nic"),
    ("name: b\n    count: 2", "name: a", r"c\.yaml: cluster lab: two nodes are named 'a'"),
    ("    nic: 25 ", "    link: nvlink\n    nic: 25 ", r"c\.yaml:13: nodes\[1\]\.link: link is 'nvlink', but device"),
    ("    nic: 25 ", "    link: nvlnk\n    nic: 25 ", r"c\.yaml:13: nodes\[1\]\.link: unknown link 'nvlnk'; did you"),
    ("    nic: 25 ", "    instance: DGX-H100\n    nic: 25 ", r"c\.yaml:10: nodes\[1\]\.devices: give either"),
    ("rack_uplink", "rackuplink", r"c\.yaml:15: rackuplink: unknown key .*'rack_uplink'"),
    ("rack_uplink:", "node_matrix: {bandwidth: [[1, 2], [3, 4]]}\nrack_uplink:", r"c\.yaml:15: node_matrix: .*3 rows"),
    ("    devices: {device: A100-SXM4-80GB, count: 2}\n", "", r"c\.yaml:4: nodes\[0\]: node a: devices is empty"),
    ("{device: A100-SXM4-80GB, count: 2}", "{name: new, memory: 3 GB}",
     r"c\.yaml:5: nodes\[0\]\.devices: without a known 'device', 'flops', 'vector_flops', 'memory_bandwidth' must be"),
    ("cluster/1", "job/1", r"c\.yaml:1: mixfleet: this is 'job/1'; a cluster file"),
])
def test_what_is_wrong_is_named_with_its_place(load, old, new, says):
    assert old in LAB
    with pytest.raises(InputError, match=says):
        load(LAB.replace(old, new))


def test_a_device_of_ones_own(load):
    cluster = load("mixfleet: cluster/1\nnodes:\n  - name: x\n    devices: {name: new, flops: {fp32: 3 TFLOP/s}, "
                   "memory: 5 GiB, memory_bandwidth: 7 GB/s, pcie_bandwidth: 11 GB/s}\n")
    assert cluster.devices == (Device(name="new", flops={"fp32": 3e12}, vector_flops=3e12, memory_bytes=5 * 2**30,
                                      memory_Bps=7e9, pcie_Bps=11e9),)
    assert cluster.nodes[0].link.bandwidth_Bps == 11e9


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_load_and_survive_saving(path, tmp_path):
    cluster = Cluster.load(path)
    cluster.save(tmp_path / "again.yaml")
    assert Cluster.load(tmp_path / "again.yaml") == cluster
    assert cluster.name == path.stem


def test_the_examples_are_what_they_say():
    sizes = {p.stem: len(Cluster.load(p).devices) for p in EXAMPLES}
    assert sizes == {"mixed-lab": 28, "p4d-64": 512, "h100-128": 1024, "two-regions": 48, "laptop": 3, "workstation": 8,
                     "three-and-one": 4}


def test_equal_nodes_are_written_once(tmp_path, load):
    load(LAB).save(tmp_path / "again.yaml")
    text = (tmp_path / "again.yaml").read_text()
    assert text.count("name: b") == 1
    assert "count: 2" in text


positive = st.floats(min_value=1e-9, max_value=1e15)
names = st.text("abcxyz-019 #:", min_size=1, max_size=6).filter(lambda t: t == t.strip())
links = st.builds(Link, name=names, latency_s=st.floats(min_value=0, max_value=1), bandwidth_Bps=positive)
block_times = st.builds(BlockTime, block=names, micro_batch=st.integers(1, 9), seq_len=st.integers(1, 9),
                        precision=st.just("fp32"), forward_s=positive, backward_s=positive, tensor=st.integers(1, 3))
own_devices = st.builds(
    Device, name=names, kind=st.sampled_from(["gpu", "cpu"]), vendor=names, arch=names,
    flops=st.dictionaries(st.sampled_from(DTYPES), positive, min_size=1), vector_flops=positive,
    memory_bytes=st.integers(1, 2**40), memory_Bps=positive, cache_bytes=st.integers(0, 2**30),
    sm_count=st.integers(0, 200), link_Bps=st.just(0.0) | positive, pcie_Bps=st.just(0.0) | positive,
    power_w=st.floats(0, 1000), price_per_hour=st.none() | st.floats(0, 10),
    efficiency=st.dictionaries(st.sampled_from(["gemm", "norm"]), st.floats(0.1, 2)), launch_s=st.none() | positive,
    cores=st.lists(st.integers(0, 7), max_size=2).map(tuple), share=st.floats(0.01, 1),
    block_times=st.lists(block_times, max_size=2).map(tuple), source=names)
catalog_devices = st.builds(
    lambda name, changes: device_named(name).replace(**changes), st.sampled_from(["T4", "H100-SXM", "MI300X", "cpu"]),
    st.fixed_dictionaries({}, optional={
        "flops": st.dictionaries(st.sampled_from(DTYPES), positive, min_size=1), "memory_bytes": st.integers(1, 2**40),
        "link_Bps": st.just(0.0), "pcie_Bps": st.just(0.0), "power_w": st.just(0.0), "launch_s": st.none(),
        "source": st.just(""), "price_per_hour": st.floats(0, 9)}))
devices = own_devices | catalog_devices


@st.composite
def clusters(draw):
    labels = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    nodes = []
    for label in labels:
        runs = draw(st.lists(st.tuples(devices, st.integers(1, 3)), min_size=1, max_size=2))
        node = Node(name=label, devices=tuple(d for d, n in runs for _ in range(n)), link=draw(links), nic=draw(links),
                    rack=draw(st.just("") | names), zone=draw(st.just("") | names),
                    host_memory_bytes=draw(st.integers(0, 2**40)), host_Bps=draw(st.just(0.0) | positive))
        copies = draw(st.integers(1, 3))
        nodes += [node] if copies == 1 else [node.replace(name=f"{label}-{i}") for i in range(copies)]
    unique = {n.name: n for n in nodes}
    row = st.tuples(*[positive] * len(unique))
    matrix = draw(st.just(()) | st.tuples(*[row] * len(unique)))
    return Cluster(name=draw(names), nodes=tuple(unique.values()), rack_uplink=draw(st.none() | links),
                   zone_uplink=draw(st.none() | links), node_matrix_Bps=matrix,
                   node_latency_s=matrix and draw(st.just(()) | st.tuples(*[row] * len(unique))))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture,
                                                                 HealthCheck.too_slow])
@given(clusters())
def test_a_saved_cluster_loads_as_an_equal_one(tmp_path, cluster):
    path = tmp_path / "c.yaml"
    path.unlink(missing_ok=True)
    cluster.save(path)
    assert Cluster.load(path) == cluster


TOKENS = ["-1", "[", "]", "{", "}", ": ", "null", "1e99", ".nan", ".inf", "\n", "  ", "- ", "&a ", "*a", "!!int ",
          "true", "'", '"', "0", "[1, 2]", "{a: b}", "2024-01-01", "~", "? ", "|\n", "<<: ", "%", "\t", "a100", "x"]
edits = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12), st.sampled_from(TOKENS)), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits)
def test_a_spoiled_file_is_a_cluster_or_one_line_of_error(tmp_path, edits):
    text = LAB
    for place, cut, token in edits:
        at = int(place * len(text))
        text = text[:at] + token + text[at + cut:]
    path = tmp_path / "c.yaml"
    path.write_text(text)
    problem = ""
    try:
        Cluster.load(path)
    except InputError as error:
        problem = str(error)
    assert not problem or (problem.startswith(str(path)) and "\n" not in problem)


def test_adapters_survive_the_cluster_file(tmp_path):
    text = tmp_path / "c.yaml"
    text.write_text("mixfleet: cluster/1\nnodes:\n  - {name: a, instance: p4d.24xlarge, count: 2}\n"
                    "  - {name: b, devices: {device: A100-SXM4-40GB, count: 4}, nic: 400 Gb/s, nics: 2}\n")
    found = Cluster.load(text)
    assert [n.nics for n in found.nodes] == [4, 4, 2]
    found.save(tmp_path / "d.yaml")
    assert Cluster.load(tmp_path / "d.yaml").nodes == found.nodes
    assert found.nodes[0].adapter(7, "out") == ("a-0:nic3:out", 12.5e9, "EFA 1")
    text.write_text(text.read_text().replace("nics: 2", "nics: 0"))
    with pytest.raises(InputError, match="nics is 0"):
        Cluster.load(text)
