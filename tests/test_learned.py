"""The learned layer: trees against a plain walk, laws of physics, intervals, the fallback, versions."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixfleet.cluster import Device, device_named
from mixfleet.cost import demand, learned, query
from mixfleet.cost.learned import Factors, Forest, Relatives
from mixfleet.errors import InputError

NOISE = 0.85
"""More work may be predicted faster by what two library versions on one device differ by at most."""
H100, A100, L4, B200 = (device_named(n) for n in ("H100-SXM", "A100-SXM4-80GB", "L4", "B200-SXM"))
POWERS = st.integers(0, 7)


def some_forest():
    return Forest(np.array([[0, 1], [1, 1]], np.int16), np.array([[0, 1], [0, 255]], np.uint8),
                  np.array([[1, 2, 3, 5], [10, 20, 40, 80]], np.float32),
                  (np.array([0.5], np.float32), np.array([1.5, 2.5], np.float32)), 0.25)


def test_trees_by_hand():
    x = np.array([[0.0, 1.0], [1.0, 2.0], [1.0, 3.0]], np.float32)
    # tree 1: bit 0 is x0 > 0.5, bit 1 is x1 > 2.5; tree 2: bit 0 is x1 > 1.5, bit 1 is never set
    assert some_forest().predict(x).tolist() == [0.25 + 1 + 10, 0.25 + 2 + 20, 0.25 + 5 + 20]


def test_many_rows_are_evaluated_as_few_are():
    forest = learned.load().forests["gemm.16bit"]
    x = np.random.default_rng(7).normal(0, 4, (300, len(forest.borders))).astype(np.float32)
    parts = np.concatenate([forest.predict(x[i:i + 30]) for i in range(0, 300, 30)])
    assert forest.predict(x) == pytest.approx(parts, rel=1e-5, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(m=POWERS, n=POWERS, k=POWERS, which=st.sampled_from("mnk"), device=st.sampled_from([H100, A100, L4]))
def test_more_work_is_never_faster_by_more_than_noise(m, n, k, which, device):
    size = {"m": 64 * 2**m, "n": 128 * 2**n, "k": 128 * 2**k}
    more = {**size, which: 2 * size[which]}
    one, two = (query.gemm(s["m"], s["n"], s["k"], device).time_s[0] for s in (size, more))
    assert two >= NOISE * one


SIZES = st.integers(0, 9)


@st.composite
def any_kernel(draw):
    """A kernel of any kind, with sizes from 1 to 512 times 1 to 128 and unlike one another."""
    kind = draw(st.sampled_from(sorted(query.KINDS)))
    a, b, c, d = (2 ** draw(SIZES) for _ in range(4))
    sizes = {"gemm": {"m": a, "n": 64 * b, "k": 96 * c, "batch": min(d, 4)},
             "attention": {"batch": a, "q_len": 7 * b, "kv_len": 7 * b * min(c, 4), "heads": 32, "kv_heads": 8},
             "moe": {"tokens": a, "hidden": 128 * b, "inter": 96 * c, "topk": 4, "experts": 4 * min(d, 32)},
             "stream": {"rows": 3 * a, "cols": 5 * b},
             "conv": {"n": a, "c_in": 4 * min(b, 128), "h": 9 + d, "w": 11 + d, "c_out": 12 * min(c, 64), "r": 3,
                      "s": 3, "pad": 1, "pad_w": 1}}[kind]
    dtype = {"gemm": ("bf16", "fp32", "tf32", "int8"), "conv": ("fp32",)}.get(kind, ("bf16",))
    op = "attn_decode" if kind == "attention" and b == 1 else None
    sizes |= {"q_len": 1} if op else {}
    return kind, {**sizes, "dtype": draw(st.sampled_from(dtype)), **({"op": op} if op else {})}


def scaled(device, what, factor):
    """A variant of a device with `factor` times as much of something."""
    if what in ("tensor", "clock", "SMs"):
        more = {"flops": {t: factor * rate for t, rate in device.flops.items()}}
        more |= {"vector_flops": factor * device.vector_flops} if what != "tensor" else {}
        more |= {"sm_count": round(factor * device.sm_count)} if what == "SMs" else {}
    else:
        more = {what: factor * getattr(device, what)}
    return device.replace(name=f"{device.name} with {factor} {what}", base=device.known_as, **more)


MORE_OF_A_DEVICE = ("memory_Bps", "cache_bytes", "vector_flops", "tensor", "clock", "SMs")


@settings(max_examples=80, deadline=None)
@given(kernel=any_kernel(), factors=st.lists(st.floats(1, 8), min_size=2, max_size=2).map(sorted),
       what=st.sampled_from(MORE_OF_A_DEVICE), device=st.sampled_from([H100, A100, L4, B200]))
def test_more_of_a_device_is_never_slower(kernel, factors, what, device):
    """By construction, so without any margin: more bandwidth, cache or compute, from the known device on and beyond."""
    kind, columns = kernel
    found = [query.predict(kind, columns, d) for d in (
        device, *(scaled(device, what, int(f * 4) / 4 if what == "SMs" else f) for f in factors))]
    for less, more in pairwise(found):
        assert more.time_s[0] <= less.time_s[0] * (1 + 1e-9)
        assert more.ceiling_s[0] <= less.ceiling_s[0] * (1 + 1e-9)


def test_a_variant_runs_the_kernels_of_its_base():
    """Twice the bandwidth halves what a large copy takes beyond its floor; nothing changed is nothing changed."""
    copy = {"rows": 65536, "cols": 16384, "op": "add"}
    plain, same, wide = (query.predict("stream", copy, d) for d in (
        A100, A100.replace(name="mine", base=A100.name, price_per_hour=7.0), scaled(A100, "memory_Bps", 2)))
    assert same.time_s[0] == plain.time_s[0]
    assert (same.low_s[0], same.high_s[0]) == (plain.low_s[0], plain.high_s[0])
    assert wide.time_s[0] - wide.floor_s[0] == pytest.approx((plain.time_s[0] - plain.floor_s[0]) / 2, rel=0.02)
    assert wide.high_s[0] / wide.low_s[0] > plain.high_s[0] / plain.low_s[0]
    product = query.gemm(8192, 8192, 8192, A100), query.gemm(8192, 8192, 8192, scaled(A100, "tensor", 1.5))
    assert 1.2 < product[0].time_s[0] / product[1].time_s[0] < 1.5


def test_an_unmeasured_device_runs_the_kernels_of_its_sibling():
    """The same chip under another name: the same times, less certain; a source that timed none has no sibling."""
    unseen = H100.replace(name="H101")
    group = learned.load().groups["moe.16bit"]
    assert learned.sibling(unseen, group, "aiconfigurator") == "H100-SXM"
    assert learned.sibling(unseen, group, "nobody") is None
    assert learned.sibling(H100, group, "aiconfigurator") is None
    assert learned.sibling(unseen.replace(arch="Hopper GH99"), group, "aiconfigurator") is None
    experts = {"tokens": 64, "hidden": 4096, "inter": 1536, "topk": 4, "experts": 64}
    same, other, wide = (query.predict("moe", experts, d) for d in (
        H100, unseen, unseen.replace(memory_Bps=2 * H100.memory_Bps)))
    assert other.time_s[0] == pytest.approx(same.time_s[0])
    assert other.high_s[0] / other.low_s[0] > same.high_s[0] / same.low_s[0]
    assert wide.time_s[0] < 0.8 * other.time_s[0]
    products = learned.load().groups["gemm.16bit"]
    known = device_named("A100-SXM4-40GB")
    assert learned.sibling(known, products, "aiconfigurator") == "A100-SXM4-80GB"
    assert learned.sibling(known, products, "aiconfigurator", by_figures=True) is None
    assert learned.sibling(unseen, products, "aiconfigurator", by_figures=True) == "H100-SXM"


def test_the_sibling_is_the_one_of_most_alike_rates():
    """An H20 gives its vector units 9 W for a TFLOP/s and an H100 10. At a third more clock an H100 gives 8, and still
    has nothing of an H20, which has a seventh of its tensor units."""
    group = learned.load().groups["moe.16bit"]
    fast = H100.replace(name="H101", flops={t: 1.3 * rate for t, rate in H100.flops.items()},
                        vector_flops=1.3 * H100.vector_flops)
    assert learned.sibling(fast, group, "pipeweave") in ("H100-SXM", "H800-SXM")
    assert learned.sibling(device_named("H20").replace(name="H21"), group, "pipeweave") == "H20"
    assert learned.unlike(H100, H100) == 0
    assert learned.unlike(fast, H100) == pytest.approx(3 * np.log(1.3))  # tensor, vector, and watts per vector rate


@settings(max_examples=60, deadline=None, derandomize=True)
@given(kernel=any_kernel(), factor=st.floats(1, 1.25), what=st.sampled_from(MORE_OF_A_DEVICE),
       device=st.sampled_from([H100, A100]))
def test_a_little_more_of_a_made_up_device_is_not_slower_beyond_noise(kernel, factor, what, device):
    """A device of a measured chip under a name of its own; much more of it may lead to another sibling."""
    kind, columns = kernel
    mine = device.replace(name="mine")
    more = scaled(mine, what, int(factor * 4) / 4 if what == "SMs" else factor).replace(name="more", base="")
    less_s, more_s = (query.predict(kind, columns, d).time_s[0] for d in (mine, more))
    assert more_s <= less_s / NOISE


def test_units_that_the_base_lacks_have_the_usual_rate_there():
    both = A100.replace(name="both", base=A100.name, flops={**A100.flops, "fp8": 700e12})
    base = learned.reference(both)
    assert base.flops["fp8"] == 2 * A100.flops["bf16"]
    assert learned.reference(A100) is A100
    slow, fast = (query.gemm(4096, 4096, 4096, both.replace(flops={**both.flops, "fp8": f}), dtype="fp8").time_s[0]
                  for f in (500e12, 900e12))
    assert fast < slow


def test_measured_kernels_of_a_variant_speak_for_itself():
    from mixfleet.cluster import KernelTime

    wide = scaled(A100, "memory_Bps", 2)
    sizes = [{"m": float(m), "n": 4096.0, "k": 4096.0} for m in (512, 1024, 2048, 4096, 8192)]
    expected = [query.gemm(s["m"], s["n"], s["k"], wide).time_s[0] for s in sizes]
    taught = wide.replace(kernel_times=tuple(KernelTime(kind="gemm", op="gemm", dtype="bf16", sizes=s, time_s=1.4 * t)
                                             for s, t in zip(sizes, expected)))
    assert query.gemm(3072, 4096, 4096, taught).time_s[0] == pytest.approx(
        1.4 * query.gemm(3072, 4096, 4096, wide).time_s[0], rel=0.08)


def test_interval_holds_the_time_and_is_wider_for_unknown_devices():
    known = query.gemm(4096, 4096, 4096, H100)
    other = query.gemm(4096, 4096, 4096, H100.replace(name="H101"))
    assert known.low_s[0] < known.time_s[0] < known.high_s[0]
    assert other.high_s[0] / other.low_s[0] > known.high_s[0] / known.low_s[0]
    assert known.binds == ["tensor"]
    assert known.time_s[0] > known.ceiling_s[0]


def test_far_outside_the_data_it_is_the_bound_at_a_fixed_efficiency():
    far = query.gemm(2**27, 2**22, 2**20, H100)
    near = query.gemm(4096, 4096, 4096, H100)
    assert near.inside[0]
    assert not far.inside[0]
    assert far.high_s[0] / far.time_s[0] == pytest.approx(learned.FALLBACK_RANGE[1])
    chip = learned.load().groups["gemm.16bit"].factors["H100-SXM"].chip["bf16"]
    assert far.time_s[0] >= far.ceiling_s[0] / learned.FALLBACK_EFFICIENCY / chip * 0.999


def test_columns_and_single_queries_agree():
    columns = {"m": [128, 4096, 33], "n": [256, 512, 1024], "k": [4096, 768, 64], "dtype": ["bf16", "fp32", "bf16"],
               "gpu": ["H100-SXM", "L4", "A100-SXM4-80GB"]}
    together = query.predict("gemm", columns, {d.name: d for d in (H100, A100, L4)})
    for i, device in enumerate((H100, L4, A100)):
        alone = query.gemm(*(columns[c][i] for c in "mnk"), device, dtype=columns["dtype"][i])
        assert alone.time_s[0] == pytest.approx(together.time_s[i], rel=1e-6)


@pytest.mark.parametrize(("kind", "columns"), [
    ("attention", {"batch": 2, "q_len": 1024, "kv_len": 1024, "heads": 16, "kv_heads": 4}),
    ("attention", {"batch": 32, "q_len": 1, "kv_len": 4096, "heads": 16, "kv_heads": 4, "op": "attn_decode"}),
    ("attention", {"batch": 4, "q_len": 1, "kv_len": 4096, "heads": 16, "kv_heads": 1, "op": "mla_decode"}),
    ("moe", {"tokens": 4096, "hidden": 4096, "inter": 1024, "topk": 4, "experts": 64}),
    ("stream", {"rows": 4096, "cols": 4096, "op": "rmsnorm", "dtype": "fp16"}),
    ("conv", {"n": 16, "c_in": 64, "h": 56, "w": 56, "c_out": 64, "r": 3, "s": 3, "pad": 1, "pad_w": 1,
              "dtype": "fp32"})])
def test_every_kind_is_predicted_near_its_bound(kind, columns):
    found = query.predict(kind, columns, A100)
    assert found.inside[0]
    assert 0.3 < found.time_s[0] / found.ceiling_s[0] < 30
    assert found.low_s[0] < found.time_s[0] < found.high_s[0]


@pytest.mark.parametrize(("columns", "message"), [
    ({"m": 0, "n": 3, "k": 4}, "m is 0 in row 0; sizes must be positive"),
    ({"m": 2, "n": [5, -3], "k": 4}, "n is -3 in row 1"),
    ({"m": 2, "n": 5}, "gemm needs k"), ({"m": 2, "n": 5, "k": float("nan")}, "k is nan in row 0"),
    ({"m": 2, "n": 5, "k": float("inf")}, "k is inf"), ({"m": "two", "n": 5, "k": 7}, "m is 'two'; sizes are numbers"),
    ({"m": [2, 3], "n": [5, 6, 7], "k": 7}, "unequal length: m 2, n 3"),
    ({"m": 2, "n": 5, "k": 7, "dtype": "fp8"}, "A100-SXM4-80GB has no fp8 units .* emulate=True"),
    ({"m": 2, "n": 5, "k": 7, "dtype": "bf17"}, "did you mean")])
def test_bad_queries(columns, message):
    with pytest.raises(InputError, match=message):
        query.predict("gemm", columns, A100)


def test_emulation_is_slower_than_the_real_units():
    assert query.gemm(4096, 4096, 4096, A100, dtype="fp8", emulate=True).ceiling_s[0] == pytest.approx(
        query.gemm(4096, 4096, 4096, A100).ceiling_s[0], rel=0.3)


def test_coefficients_of_another_version_are_refused(tmp_path):
    path = tmp_path / "old.npz"
    np.savez(path, version=np.int64(learned.VERSION + 1))
    with pytest.raises(InputError, match=f"version {learned.VERSION + 1}, this code needs {learned.VERSION}"):
        learned.load(path)


def test_a_file_that_holds_no_coefficients(tmp_path):
    path = tmp_path / "kernels.npz"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match=r"kernels\.npz: not a file of coefficients"):
        learned.load(path)


def test_saved_coefficients_read_back(tmp_path):
    layer = learned.load()
    first, second = tmp_path / "a.npz", tmp_path / "b.npz"
    learned.save(layer, first)
    learned.save(learned.load(first), second)
    assert first.read_bytes() == second.read_bytes()
    assert learned.load(second).groups == layer.groups


def test_relatives_weigh_by_kinship():
    me = Relatives("Hopper GH100", "Hopper", "NVIDIA", 0.0)
    twin, cousin = me, Relatives("Hopper GH20", "Hopper", "NVIDIA", 0.0)
    weak = Relatives("Hopper GH100", "Hopper", "NVIDIA", -1.0)
    assert me.weight(twin) == 1
    assert me.weight(cousin) == pytest.approx(0.3)
    assert me.weight(weak) == pytest.approx(np.exp(-2))


def test_factors_of_an_unknown_device_are_the_mean_of_its_relatives():
    a, b = Relatives("X 1", "X", "V", 0.0), Relatives("X 1", "X", "V", 0.0)
    group = learned.load().groups["gemm.16bit"].replace(factors={
        "a": Factors(chip={"fp16": 0.5}, dram=0.9, floor_s={"s": 4e-6}),
        "b": Factors(chip={"fp16": 0.8}, dram=0.4, floor_s={"s": 9e-6})})
    device = Device(name="c", vendor="V", arch="X 1", flops={"fp32": 1e12}, vector_flops=1e12, memory_bytes=1,
                    memory_Bps=1e9, power_w=1.0)
    found = learned.factors_of(group, device, {"a": a, "b": b})
    assert found.chip["fp16"] == pytest.approx((0.5 * 0.8) ** 0.5)
    assert found.dram == pytest.approx(0.6)
    assert found.floor_s["s"] == pytest.approx(6e-6)
    assert demand.sms(device) >= 1


def test_watts_that_do_not_suffice_limit_fp32():
    """24 pJ for a FLOP in 2016: a P4's 75 W feed 0.568 of its 5.5 TFLOP/s, a P100's 250 W all of its 9.3."""
    p4, p100 = device_named("P4"), device_named("P100-PCIe-16GB")
    assert learned.fed(p4) == pytest.approx((75 / (24 * p4.vector_flops / 1e12)) ** learned.STARVED)
    assert learned.fed(p100) == 1
    assert learned.fed(device_named("MI100")) == 1  # its fp32 products run on matrix units
    assert learned.fed(p4.replace(name="P5")) == 1  # of no known year
    group = learned.load().groups["gemm.fp32"].replace(factors={"P100-PCIe-16GB": Factors(chip={"fp32": 0.9})})
    relatives = {"P100-PCIe-16GB": Relatives.of(p100)}
    assert learned.factors_of(group, p4, relatives).chip["fp32"] == pytest.approx(0.9 * learned.fed(p4))
    other = learned.load().groups["conv"].replace(factors=group.factors)
    assert learned.factors_of(other, p4, relatives).chip["fp32"] == pytest.approx(0.9)


def test_a_device_on_which_only_long_kernels_were_timed_has_the_launch_of_its_relatives():
    group = learned.load().groups["gemm.fp32"].replace(factors={
        "A100-SXM4-80GB": Factors(floor_s={"k": 400e-6, "k torch fp32": 500e-6}),
        "H100-SXM": Factors(floor_s={"n": 30e-6}), "T4": Factors(floor_s={"n": 20e-6})})
    relatives = {name: Relatives.of(device_named(name)) for name in group.factors}
    found = learned.factors_of(group, A100, relatives)
    assert 20e-6 < learned.floor_of(found, "n", "cublas", "fp32") < 30e-6
    assert learned.floor_of(found, "k", "torch", "fp32") == 500e-6
    assert learned.factors_of(group, H100, relatives) == group.factors["H100-SXM"]
    assert query.gemm(512, 512, 512, A100, dtype="fp32").time_s[0] < 100e-6


def test_a_chip_factor_comes_from_devices_that_feed_their_tensor_units_as_well():
    """fp16 and bf16 are one unit. V100 gives 2.4 W to a TFLOP/s in 16 bits, RTX 4090 2.7, T4 1.1, B200 0.44."""
    v100 = device_named("V100-SXM2-32GB")
    names = ("RTX4090", "T4", "B200-SXM")
    group = learned.load().groups["gemm.16bit"].replace(factors={
        name: Factors(chip={kind: chip}) for name, kind, chip in zip(names, ("bf16", "fp16", "bf16"), (0.9, 0.6, 0.5))})
    relatives = {name: Relatives.of(device_named(name)) for name in names}
    found = learned.factors_of(group, v100, relatives).chip
    power = np.array([450 / 165.2, 70 / 65, 1000 / 2250])
    near = np.exp(-2 * np.abs(np.log(power / (300 / 125))))
    assert found["fp16"] == found["bf16"]
    assert found["fp16"] == pytest.approx(np.exp(near @ np.log([0.9, 0.6, 0.5]) / near.sum()), rel=0.01)


def test_tf32_takes_what_16_bits_take_with_an_inner_dimension_twice_as_long():
    """Half of the rate and twice the bytes; 3 products of 2 types, one too small in k for its results' bytes."""
    a100 = device_named("A100-SXM4-80GB")
    m, n, k = [4096, 2048, 16384], [1024, 8192, 16384], [1024, 512, 8]
    tf32 = query.gemm(m, n, k, a100, dtype="tf32")
    bf16 = query.gemm(m, n, [2 * x for x in k], a100)
    moved_s = 4 * (16384 * 8 * 2 + 16384 * 16384) / a100.memory_Bps
    assert tf32.time_s[:2] == pytest.approx(bf16.time_s[:2])
    assert tf32.ceiling_s[2] == pytest.approx(moved_s)
    assert tf32.time_s[2] == pytest.approx(max(moved_s, bf16.time_s[2]))
    assert (tf32.time_s > query.gemm(m, n, k, a100).time_s).all()
    mixed = query.predict("gemm", {"m": m, "n": n, "k": k, "dtype": ["tf32", "bf16", "fp32"]}, a100)
    alone = query.gemm(m, n, k, a100)
    assert mixed.time_s[:2] == pytest.approx([tf32.time_s[0], alone.time_s[1]])
    with pytest.raises(InputError, match="no tf32 units"):
        query.gemm(m, n, k, device_named("V100-SXM2-32GB"), dtype="tf32")


def test_a_large_question_asked_again_has_the_same_answer_whatever_became_of_the_first_one():
    m = np.arange(64.0, 64.0 + query.LARGE)
    first = query.gemm(m, 1024, 512, H100)
    time_s, high_s = first.time_s.copy(), first.high_s.copy()
    first.time_s[:] = 0
    assert (query.gemm(m, 1024, 512, H100).time_s == time_s).all()
    few = query.gemm(m[:40], 1024, 512, H100)
    assert few.time_s == pytest.approx(time_s[:40])
    for other in (query.gemm(m, 1024, 512, A100), query.gemm(m, 1024, 256, H100), query.gemm(m + 1, 1024, 512, H100),
                  query.gemm(m, 1024, 512, H100, dtype="fp16")):
        assert (other.time_s != time_s).any()
    bare = query.gemm(m, 1024, 512, H100, interval=False)
    assert (bare.time_s == time_s).all()
    assert (bare.low_s == time_s).all()
    assert (bare.high_s < high_s).all()
