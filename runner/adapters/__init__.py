"""Train models that were written for other frameworks. Import these modules in a task file."""
