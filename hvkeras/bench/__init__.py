"""`hvkeras bench`: benchmarks engines side by side on the same work, and verifies every result."""
