"""Check what training needs on this machine, each item in a subprocess, and suggest fixes."""
