"""Use a trained model: inference, evaluation on a split, export and import."""
