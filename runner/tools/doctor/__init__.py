"""Check that this machine has what training needs, each check in a subprocess, and suggest fixes."""
