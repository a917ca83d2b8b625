"""`hvkeras bench`: interleaved benchmarks of engines on the same work, with every result verified."""
