"""An encoder-decoder transformer: from a description of a function to its signature."""
