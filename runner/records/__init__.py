"""Records of a run: its log, events, plan, measurements and result."""
