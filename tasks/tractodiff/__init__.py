"""Diffusion of streamline segments: tractography that samples the continuation of a fiber."""
