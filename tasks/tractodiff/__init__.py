"""Diffusion of streamline pieces: tractography that draws how a fibre goes on."""
