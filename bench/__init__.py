"""Benchmarks: named workloads, one timer, rivals beside jitattn. See README.md for the protocol."""
