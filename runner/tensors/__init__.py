"""Tensors of models and optimizers: buffers, optimizer state, random state, copies and comparisons."""
