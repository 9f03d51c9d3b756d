"""Rendering, compiling with NVRTC, and the kernel cache on disk."""
