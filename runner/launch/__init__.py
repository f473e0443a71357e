"""Who runs what where: one process, and sweeps of one process at a time."""
