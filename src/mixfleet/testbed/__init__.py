"""One Linux machine as the mixed cluster of a cluster file: namespaces, shaped links, throttled devices. Needs root."""

from mixfleet.testbed.bed import State, Testbed, leftovers, testbeds
from mixfleet.testbed.kernel import Support, probe
from mixfleet.testbed.layout import Layout, emulate_gpus, laid_out

__all__ = ["Layout", "State", "Support", "Testbed", "emulate_gpus", "laid_out", "leftovers", "probe", "testbeds"]
