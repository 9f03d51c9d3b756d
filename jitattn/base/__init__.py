"""Errors, settings from the environment, record types and argument validation."""
