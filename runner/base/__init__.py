"""Code that every package uses: errors, text, values of settings, the task contract, order and random numbers."""
