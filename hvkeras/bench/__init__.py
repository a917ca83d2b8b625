"""`hvkeras bench`: engines side by side in one job, on the same work, with every result verified."""
