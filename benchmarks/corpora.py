"""What the corpora of this installation are: sizes, masked shares, fingerprints.

``plpkg doctor`` compares an installation's text with the record.

Run: ``python -m benchmarks.corpora`` (a minute).
"""

from benchmarks import record
from plpkg import corpora

if __name__ == "__main__":
    names = ("public", *corpora.writers())
    built_with = corpora.described(corpora.versions())
    record.write("corpora", [row | {"built_with": built_with} for n in names for row in corpora.writer(n).rows()])
