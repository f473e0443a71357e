"""Anomaly detection in hyperspectral cubes: statistics in one pass, then gradient descent."""
