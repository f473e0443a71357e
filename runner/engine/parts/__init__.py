"""Build the parts of a run from its plan: model, data, weights, and the kind of each phase."""
