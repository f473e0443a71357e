"""Launching: a single process, ranks, cluster jobs, and the trials of sweeps and searches."""
