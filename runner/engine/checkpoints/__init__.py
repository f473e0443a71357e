"""When to save checkpoints, which ones to keep, and how to resume from them."""
