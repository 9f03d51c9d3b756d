"""Other packages' own tests, run with their import replaced by ours."""
