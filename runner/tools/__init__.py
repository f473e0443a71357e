"""Commands about runs and machines: nothing below imports them."""
