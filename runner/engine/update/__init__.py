"""One update: losses and gradients of its micro-batches, the step, and the retry after an out-of-memory error."""
