"""Persistent state: the run directory, its lock, checkpoints, resuming, signals."""
