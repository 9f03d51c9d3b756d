"""CUDA driver calls and device workspaces."""
