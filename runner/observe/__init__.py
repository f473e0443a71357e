"""Observe a run: records, trackers, progress, monitor, NVML and profiler."""
