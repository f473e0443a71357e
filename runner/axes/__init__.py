"""Option groups ("axes"): one file per group, one function per option. Axes do not import each other."""
