"""Decode and prefill attention over paged KV caches."""
