"""Measures real devices and links into the figures that the cost model reads. Needs torch to measure."""

from mixfleet.calibrate.discover import discover
from mixfleet.calibrate.kernels import profile_job
from mixfleet.calibrate.pinned import MeasurementError

__all__ = ["MeasurementError", "discover", "profile_job"]
