"""Tensor arguments as checked values: page tables, KV caches, rotary embeddings, tensor maps."""
