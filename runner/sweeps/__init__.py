"""Sweeps and searches, whose trials are separate process trees."""
