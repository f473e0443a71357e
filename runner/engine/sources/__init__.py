"""Sources of samples: splits, streams and custom loaders; and the identity of the data and code of a run."""
