"""What is seen of a run: records, trackers, progress, monitor, NVML, profiler."""
