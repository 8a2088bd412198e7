"""The simulator: one optimizer step of a plan, in simulated time."""

from mixfleet.sim.prediction import DeviceUse, Prediction, predict, simulate

__all__ = ["DeviceUse", "Prediction", "predict", "simulate"]
