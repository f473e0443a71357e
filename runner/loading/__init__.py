"""Data loaders: in this process, in a thread or in worker processes; the choice among them, and a cache of samples."""
