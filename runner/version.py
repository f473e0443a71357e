"""The version of accel-run; `runner.__version__` for users."""

__version__ = "0.3.0"
