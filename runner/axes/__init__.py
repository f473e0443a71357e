"""One file per axis of choice; one function per option; none of them knows another."""
