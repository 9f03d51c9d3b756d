"""Gathering and copying of pages, and construction of page tables."""
