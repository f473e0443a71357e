"""Resources of a process that the operating system manages: cores, memory, subprocesses, stacks, descriptors."""
