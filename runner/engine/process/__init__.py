"""What surrounds a run in its process: the attempt and its records, the terminal, the watchdog."""
