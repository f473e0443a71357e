"""Set up a run, execute its phases, run the training loop and call hooks."""
