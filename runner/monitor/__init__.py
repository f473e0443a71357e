"""Monitor GPUs, CPU, memory and disk of the machine, during a run or around any Python code."""
