"""A language model of the GPT-2 family on real text."""
