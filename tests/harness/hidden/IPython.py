"""Hides IPython from ranks: Keras imports it where it is installed, which takes a tenth of a rank's start."""

raise ImportError("IPython is hidden from the ranks of tests")
