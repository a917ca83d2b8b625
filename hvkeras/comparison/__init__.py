"""`hvkeras compare`: the same script on each backend, and what that says: a table, `results.json` and a report."""
