"""What every package needs: errors, text, values of settings, the task contract, order and random numbers."""
