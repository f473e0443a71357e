"""Planning: derive the Plan of a run, with reasons, from its configuration and an inventory of the machine."""
