"""Predict, plan and run deep-learning training on the accelerators that people have."""
