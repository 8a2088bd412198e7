"""Hand-worked demands with unequal numbers, and laws between totals and the busiest SM."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixfleet.cluster import Device
from mixfleet.cost import demand
from mixfleet.cost.demand import DRAM, L2, SPECIAL, TENSOR, VECTOR
from mixfleet.errors import InputError

SEVEN = Device(name="Seven", arch="Hopper", flops={"fp16": 7e12, "fp32": 1e12}, vector_flops=1e12, memory_bytes=10**10,
               memory_Bps=1e11, cache_bytes=10**6, sm_count=7)


def on(device=SEVEN, dtype="fp16"):
    return demand.machine([device], [demand.rate(device, dtype)], np.zeros(1, int))


def test_machine_rates():
    m = on()
    clock = 1e12 / (2 * 128 * 7)
    assert m.clock_Hz[0] == pytest.approx(clock)
    assert m.rates[0].tolist() == pytest.approx([7e12, 1e12, 1e12 / 16, 1e11, clock * 7 * 64, clock * 7 * 128])


def test_gemm_totals_and_busiest():
    d = demand.gemm(on(), 384, 640, 1024)  # 3 x 5 tiles of 128 x 128 on 7 SMs: the busiest has 3
    assert d.total[0, TENSOR] == 2 * 384 * 640 * 1024
    assert d.total[0, DRAM] == 2 * (384 * 1024 + 1024 * 640 + 384 * 640)
    tm_tn = {(256, 128): (2, 5), (128, 256): (3, 3), (128, 128): (3, 5), (128, 64): (3, 10), (64, 128): (6, 5)}
    waves = {t: -(-a * b // 7) for t, (a, b) in tm_tn.items()}
    work = {t: waves[t] * t[0] * t[1] for t in waves}
    assert d.busiest[0, TENSOR] / (2 * 1024) in work.values()
    assert d.tasks[0] * d.busiest[0, TENSOR] / d.waves[0] >= d.total[0, TENSOR]


def test_gemm_that_divides_evenly_loads_every_sm_alike():
    d = demand.gemm(on(), 128 * 7, 256, 4096)
    assert d.busiest[0, TENSOR] * 7 == pytest.approx(d.total[0, TENSOR])
    assert d.busiest[0, DRAM] * 7 == pytest.approx(d.total[0, DRAM])


@given(m=st.integers(1, 5000), n=st.integers(1, 5000), k=st.integers(1, 5000), batch=st.integers(1, 9))
def test_the_busiest_sm_has_at_least_the_average(m, n, k, batch):
    d = demand.gemm(on(), m, n, k, batch)
    assert np.all(d.busiest[0] * 7 >= d.total[0] * (1 - 1e-9))


def test_splitting_the_inner_dimension_fills_the_device():
    d = demand.gemm(on(), 64, 64, 7 * 64 * 4)
    assert d.tasks[0] > 1
    assert d.waves[0] == 1


def test_quantized_products_also_convert_their_input():
    plain = demand.gemm(on(), 100, 200, 300, activation=1, weight=1)
    dynamic = demand.gemm(on(), 100, 200, 300, activation=1, weight=1, quantizes=True)
    assert (dynamic.total - plain.total)[0, DRAM] == 100 * 300 * 3


@pytest.mark.parametrize(("q", "kv", "causal", "window"), [(5, 5, True, 0), (3, 10, True, 0), (7, 9, False, 0),
                                                           (6, 11, True, 4), (6, 11, True, 8), (1, 13, True, 0),
                                                           (9, 9, True, 3), (4, 4, True, 100)])
def test_visible_pairs_by_enumeration(q, kv, causal, window):
    count = 0
    for i in range(q):
        seen = kv - q + i + 1 if causal else kv
        count += min(seen, window) if window else seen
    assert demand.visible_pairs(q, kv, causal, window)[0] == count


def test_attention_by_hand():
    d = demand.attention(on(), 2, 256, 256, 6, 3, 64, causal=False)
    pairs = 2 * 6 * 256 * 256
    assert d.total[0, TENSOR] == 4 * 64 * pairs
    assert d.total[0, SPECIAL] == pairs
    assert d.total[0, DRAM] == 2 * (2 * 256 * 2 * 3 * 64 + 2 * 256 * 6 * 128)
    assert d.tasks[0] >= 2 * 6 * 2


def test_decode_reads_the_cache_once_per_kv_head():
    d = demand.attention(on(), 5, 1, 1000, 12, 3, 64)
    assert d.total[0, DRAM] == 2 * (5 * 1000 * 3 * 2 * 64 + 5 * 12 * 128)
    windowed = demand.attention(on(), 5, 1, 1000, 12, 3, 64, window=99)
    assert windowed.total[0, DRAM] == 2 * (5 * 100 * 3 * 2 * 64 + 5 * 12 * 128)


def test_moe_by_hand():
    d = demand.moe(on(), 70, 96, 160, 2, 8)
    assert d.total[0, TENSOR] == 2 * 140 * 96 * (2 * 160 + 160)
    assert d.more["weight_s"][0] == pytest.approx(8 * 96 * 480 * 2 / 1e11)
    few = demand.moe(on(), 2, 96, 160, 2, 8)
    assert few.more["weight_s"][0] == pytest.approx(4 * 96 * 480 * 2 / 1e11)
    uneven = demand.moe(on(), 70, 96, 160, 2, 8, ep=4, skewed=True)
    even = demand.moe(on(), 70, 96, 160, 2, 8, ep=4)
    assert uneven.total[0, TENSOR] / even.total[0, TENSOR] == pytest.approx(1.1 * 4**0.17)


def test_streams_count_what_moves():
    d = demand.stream(on(), 11, 300, 2, 1, element=4, vector=3, special=1, reduces=True)
    assert d.total[0, DRAM] == 11 * 300 * 3 * 4
    assert d.total[0, VECTOR] == 3 * 3300
    assert d.tasks[0] == 11
    assert d.busiest[0, DRAM] == pytest.approx(2 * 300 * 3 * 4)  # 11 rows on 7 SMs


def test_conv_is_the_product_it_says():
    d = demand.conv(on(), 3, 5, 17, 19, 7, 3, 3, stride=2, stride_w=2, pad=1, pad_w=1, element=4)
    assert d.total[0, TENSOR] == 2 * 3 * 9 * 10 * 7 * 5 * 9
    assert d.total[0, DRAM] == 4 * (3 * 5 * 17 * 19 + 3 * 7 * 90 + 7 * 5 * 9)


def test_3x3_convolutions_may_use_fewer_products():
    """Winograd: 16 products per 2x2 patch in place of 36, or 36 per 4x4 in place of 144; for 3x3 with stride 1."""
    shape = {"pad": 1, "pad_w": 1, "element": 4}
    d = demand.conv(on(), 56, 256, 32, 32, 256, 3, 3, **shape)
    assert d.more["tiled_s"][0] == min(d.more[f"{name}_s"][0] for name in ("winograd", "apart", "direct"))
    assert 16 / 36 < d.more["winograd_s"][0] / d.more["direct_s"][0] < 0.75
    assert 0.2 < d.more["apart_product_s"][0] / d.more["direct_s"][0] < 0.75
    for other in ({"r": 5, "s": 5}, {"stride": 2, "stride_w": 2}, {"dil": 2, "dil_w": 2}):
        d = demand.conv(on(), 56, 256, 32, 32, 256, **{"r": 3, "s": 3, **shape, **other})
        assert d.more["winograd_s"][0] == d.more["apart_s"][0] == d.more["fused_best_s"][0] == 0
        assert d.more["tiled_s"][0] == d.more["direct_s"][0]


def test_blocks_of_fused_winograd_are_those_that_were_launched():
    """Of 38 images of 5x5 and 326 filters, NeuSight's profile on P100 has a grid of 209 blocks (tile244: two images of
    4x4 patches); 3x3 patches of 32 fill 342 of 608 places."""
    d = demand.conv(on(), 38, 893, 5, 5, 326, 3, 3, pad=1, pad_w=1)
    assert d.more["padded.fused_best"][0] == pytest.approx(19 * 32 / (38 * 9) - 1)
    assert d.more["padded.fused_first"][0] == pytest.approx(38 * 32 / (38 * 9) - 1)
    assert d.more["fused_best_s"][0] == pytest.approx(
        np.ceil(209 / 7) * 2 * 16 * 32 * 32 * 893 / (on().rates[0, TENSOR] / 7))


def test_padding_of_a_convolutions_tiles():
    """21 output columns in tiles of 4 are 24; 30 filters in tiles of 32; 1260 pixels in tiles of 128 are 1280."""
    d = demand.conv(on(), 3, 5, 20, 21, 30, 3, 3, pad=1, pad_w=1)
    assert d.more["padded.width4"][0] == pytest.approx(24 / 21 - 1)
    assert d.more["padded.filters32"][0] == pytest.approx(32 / 30 - 1)
    assert d.more["padded.channels4"][0] == pytest.approx(8 / 5 - 1)
    assert d.more["padded.pixels128"][0] == pytest.approx(1280 / 1260 - 1)
    assert d.more["padded.patches32"][0] == pytest.approx(352 / 330 - 1)  # 3 * 10 * 11 patches of 2 x 2


def test_ceiling_names_the_slowest_pipeline():
    wide, thin = demand.gemm(on(), 4096, 4096, 4096), demand.gemm(on(), 1, 4096, 4096)
    assert wide.binds(on())[0] == TENSOR
    assert wide.ceiling_s(on())[0] == pytest.approx(2 * 4096**3 / 7e12)
    assert thin.binds(on())[0] in (DRAM, L2)


@pytest.mark.parametrize("bad", [0, -3])
def test_sizes_must_be_positive(bad):
    with pytest.raises(InputError, match=r"n is .* row 0"):
        demand.gemm(on(), 5, bad, 7)


def test_a_type_that_the_device_lacks():
    with pytest.raises(InputError, match=r"no fp8 units .* it has fp16, fp32.*emulate"):
        demand.rate(SEVEN, "fp8")
    assert demand.rate(SEVEN, "fp8", emulate=True) == 7e12
    with pytest.raises(InputError, match="did you mean"):
        demand.rate(SEVEN, "fp8_blok")
