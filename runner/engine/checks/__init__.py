"""Checks before the first update that the loss and the metrics are sums over samples."""
