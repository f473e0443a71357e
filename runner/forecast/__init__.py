"""Memory of a run, predicted without running it."""
