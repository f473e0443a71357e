"""Settings: their names, meanings, sources and checks."""
