"""One update: losses and gradients of its micro-batches, the step, and its repetition after out of memory."""
