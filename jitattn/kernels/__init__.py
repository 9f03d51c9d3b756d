"""Kernel families: one folder each, with the same file names."""
