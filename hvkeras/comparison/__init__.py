"""`hvkeras compare`: runs a script on each backend, and writes a table, `results.json` and a report."""
