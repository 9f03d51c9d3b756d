"""Command line: demo, doctor, explain, configs, precompile, cache."""
