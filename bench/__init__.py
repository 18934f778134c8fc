"""Measurements: one file a question; each prints a table with the physical limit beside it."""
