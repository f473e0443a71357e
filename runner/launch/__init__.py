"""Who runs what where: one process, ranks, jobs of a cluster, and the trials of sweeps and searches."""
