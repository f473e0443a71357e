"""The tasks: each a model, its data, its loss and what it predicts."""
