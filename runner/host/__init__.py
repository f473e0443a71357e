"""What the operating system offers to a process: cores, memory, process trees, stacks, descriptors."""
