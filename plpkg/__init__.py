"""plpkg: the mechanisms behind private, personal language models.

Each room of the package holds one mechanism and answers one notebook:
``plpkg.communication`` (notebook 01) and ``plpkg.throughput`` (notebook 03).
"""

__version__ = "0.1.0"
