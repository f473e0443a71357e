"""What a run leaves behind, besides checkpoints."""
