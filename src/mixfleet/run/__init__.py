"""Training by a plan. Importing this package does not import torch; the ranks do."""

from mixfleet.run.launch import (
    Options,
    RankReport,
    TrainError,
    TrainResult,
    torchrun_commands,
    train,
)

__all__ = ["Options", "RankReport", "TrainError", "TrainResult", "torchrun_commands", "train"]
