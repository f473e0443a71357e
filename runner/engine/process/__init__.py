"""Process-level parts of a run: the record of its state and errors, terminal output, and the watchdog."""
