"""Checks before the first update: a loss and metrics must be sums over samples."""
