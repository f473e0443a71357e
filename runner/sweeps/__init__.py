"""Grids and searches, whose trials are separate process trees."""
