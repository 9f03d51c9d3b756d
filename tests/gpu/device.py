"""Where the tests of this folder run; tests/conftest.py skips them without such a device."""

DEVICE = "cuda"
