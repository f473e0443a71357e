"""Loaders: who reads the batches of a training run, and measurements that decide it."""
