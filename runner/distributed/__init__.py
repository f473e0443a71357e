"""How processes find each other and share an update: process groups, gradients, pipelines."""
