"""One update: losses and gradients of its micro-batches, the step, and its repetition after an out-of-memory error."""
