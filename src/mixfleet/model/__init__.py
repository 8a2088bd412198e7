"""What we train: a chain of blocks with their operations, parameters, saved activations and boundaries."""

from mixfleet.model.spec import Block, Model, Op, Param, Saved, Size, TensorComm

__all__ = ["Block", "Model", "Op", "Param", "Saved", "Size", "TensorComm"]
