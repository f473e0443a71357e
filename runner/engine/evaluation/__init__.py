"""Metrics of training and evaluation: sums, states that are merged, and what trackers log."""
