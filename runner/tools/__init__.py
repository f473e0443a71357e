"""Tools behind commands that inspect or measure runs and machines; no lower layer of the package imports them."""
