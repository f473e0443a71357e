"""Option groups: one file per axis, one function per option. Axes do not import each other."""
