"""One Linux machine as the mixed cluster of a cluster file: namespaces, shaped links, throttled devices. Needs root."""

from mixfleet.testbed.bed import Testbed, leftovers, testbeds
from mixfleet.testbed.kernel import Support, probe
from mixfleet.testbed.layout import Layout, emulated, laid_out

__all__ = ["Layout", "Support", "Testbed", "emulated", "laid_out", "leftovers", "probe", "testbeds"]
