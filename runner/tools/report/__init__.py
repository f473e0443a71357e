"""The page about a run: read its files, draw charts, render HTML. The run is not changed."""
