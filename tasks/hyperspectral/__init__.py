"""Anomaly detection in hyperspectral cubes: statistics in one pass first, gradients afterwards."""
