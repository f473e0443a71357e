"""GPU, CPU and memory of the machine while something runs."""
