"""Hides matplotlib from ranks: Keras imports it where it is installed, which takes a tenth of a rank's start."""

raise ImportError("matplotlib is hidden from the ranks of tests")
