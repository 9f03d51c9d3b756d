"""jitattn inside other packages: ``jitattn.integrations.transformers``.

Each module is called after the package that it registers with, and imports it when it is used.
"""

from __future__ import annotations
