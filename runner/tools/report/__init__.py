"""The page about a run: what it left is read, drawn and laid out; nothing of the run is changed."""
