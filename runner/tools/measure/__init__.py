"""Trials in fresh processes, what is concluded from them, and the advice that was tried."""
