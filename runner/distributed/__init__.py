"""Process groups, gradient synchronization and pipelines."""
