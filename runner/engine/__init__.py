"""Train: set up a run, execute its phases, and call hooks between updates."""
