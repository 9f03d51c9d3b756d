"""Planner base, launch cache and torch operators shared by the kernel families."""
