"""The doctor: tries what training needs on this machine, each in a process of its own, and says what to change."""
