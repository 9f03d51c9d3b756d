"""Kernel specialisations as values: dtypes, layouts, architectures, configurations and support."""
