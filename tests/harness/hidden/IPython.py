"""Hide IPython from ranks: if it is installed, Keras imports it, which takes a tenth of a rank's start."""

raise ImportError("IPython is hidden from the ranks of tests")
