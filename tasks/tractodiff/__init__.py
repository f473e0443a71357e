"""Diffusion of streamline pieces: tractography that samples the continuation of a fiber."""
