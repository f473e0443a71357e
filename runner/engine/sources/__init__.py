"""Where samples come from besides datasets: streams and loaders of the task; the identity of the data of a run."""
