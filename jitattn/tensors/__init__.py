"""Tensor arguments as checked values: page tables, KV caches, rope, TMA descriptors."""
