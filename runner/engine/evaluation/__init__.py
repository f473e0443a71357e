"""Metrics of training and evaluation: sums, states that are merged, and images and histograms for trackers."""
