"""Experiment trackers, each in a separate process."""
