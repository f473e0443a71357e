"""What survives: the run directory, its lock, checkpoints, resume, signals."""
