"""Predict the memory and time of a run without running it."""
