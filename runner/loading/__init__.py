"""Data loaders: synchronous, in a thread or in worker processes, and the measurement that chooses one."""
