"""Measures real devices and links into the figures that the cost model reads. Needs torch to measure."""

from mixfleet.calibrate.discover import discover
from mixfleet.calibrate.kernels import profile_job

__all__ = ["discover", "profile_job"]
