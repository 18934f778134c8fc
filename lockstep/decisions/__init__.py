"""Decisions: typed questions about an input, answered with a probability for every option."""
