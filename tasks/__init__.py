"""Tasks: each defines a model, its data, its loss and its predictions."""
