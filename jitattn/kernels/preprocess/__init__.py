"""Fused QKV preprocessing and KV cache writes."""
