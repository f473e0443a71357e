"""The run itself: open it, walk its phases, turn the loop, call the hooks."""
