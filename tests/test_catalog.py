"""The catalog: every device becomes a valid specification with a source, or says what no source gives."""

import pytest

from mixfleet.catalog import devices
from mixfleet.catalog.instances import INSTANCES, instance_named
from mixfleet.cluster import device_named
from mixfleet.errors import InputError

REFUSED = {"MI308X", "ArcProB60"}


def test_the_table_has_all_devices_and_the_cpu():
    assert len(devices.rows()) == 65
    assert len(devices.names()) == 66


@pytest.mark.parametrize("name", [n for n in devices.names() if n not in REFUSED])
def test_every_device_is_a_valid_specification_with_a_source(name):
    device = device_named(name)
    assert device.name == name
    assert device.source
    assert device.flops["fp32"] >= device.vector_flops
    assert device.flops.get("fp16", 1e99) >= device.flops["fp32"]


@pytest.mark.parametrize(("name", "lacks"), [("MI308X", "fp32 rate or its memory bandwidth"), ("ArcProB60", "fp32")])
def test_devices_without_sure_figures_say_which(name, lacks):
    with pytest.raises(InputError, match=f"device '{name}': no source gives its .*{lacks}"):
        device_named(name)


def test_figures_are_converted_from_the_units_of_data_sheets():
    a100 = device_named("A100-SXM4-80GB")
    assert a100.flops == {"fp64": 19.5e12, "fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12,
                          "int8": 624e12}
    assert (a100.vector_flops, a100.memory_Bps, a100.link_Bps) == (19.5e12, 2039e9, 300e9)
    assert a100.cache_bytes == 40 * 2**20
    assert a100.memory_bytes == round(79.15 * 2**30)
    assert a100.pcie_Bps == pytest.approx(31.508e9, rel=1e-4)  # 16 GT/s * 128/130 / 8 * 16 lanes
    assert a100.power_w == 400
    mi300 = device_named("MI300X")
    assert (mi300.vendor, mi300.flops["fp64"], mi300.link_Bps) == ("AMD", 163.4e12, 448e9)
    assert mi300.memory_bytes == round(192 * 0.99 * 2**30)
    assert device_named("K20").pcie_Bps == 8e9  # second generation: 8b/10b
    assert device_named("K20").link_Bps == 0


def test_programs_never_get_more_than_the_nominal_memory():
    for row in devices.rows().values():
        if row["usable_gib"]:
            assert 0.89 * float(row["mem_gb"]) < float(row["usable_gib"]) < float(row["mem_gb"]), row["gpu"]


def test_bridged_cards_are_those_whose_nvlink_reaches_one_other():
    assert devices.link_peers("RTX3090") == devices.link_peers("H100-PCIe") == 1
    assert devices.link_peers("H100-SXM") is None
    for name in devices.names():
        if devices.link_peers(name):
            assert device_named(name).link_Bps, name


@pytest.mark.parametrize(("wrong", "near"), [("A100-SXM4-80", "A100-SXM4-80GB"), ("rtx4080", "RTX4090"),
                                             ("H100SXM", "H100-SXM"), ("V100-SXM2-32", "V100-SXM2-32GB")])
def test_an_unknown_device_names_the_nearest(wrong, near):
    with pytest.raises(InputError, match=f"unknown device '{wrong}'; did you mean .*{near}"):
        device_named(wrong)


def test_case_does_not_matter():
    assert device_named("a100-sxm4-80gb").name == "A100-SXM4-80GB"


@pytest.mark.parametrize("name", INSTANCES)
def test_every_instance_has_a_known_device_and_a_source(name):
    shape = instance_named(name)
    device_named(shape.device)
    assert shape.source
    assert shape.size >= 4
    assert 10 <= shape.nic_gbps <= 3200
    assert shape.price_per_hour is None or ("2024" in shape.source and 1 < shape.price_per_hour < 100)


def test_an_unknown_instance_names_the_nearest():
    with pytest.raises(InputError, match=r"unknown instance 'p4d\.24large'; did you mean .*p4d\.24xlarge"):
        instance_named("p4d.24large")
