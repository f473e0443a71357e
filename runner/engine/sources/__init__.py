"""Sources of samples: splits, streams and custom loaders; and fingerprints of the data and code of a run."""
