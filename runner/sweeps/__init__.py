"""Grids and searches: their trials, one process tree each."""
