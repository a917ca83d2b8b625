"""`hvkeras compare`: run a script on each backend, and write a table, `results.json` and a report."""
