"""`hvkeras doctor`: checks whether multi-worker training will work on this machine or on several hosts.

`software.py` checks the installed software, `machine.py` the resources of the machine, and `hosts.py` several hosts.
`hvkeras.cli.doctor` is the command line.
"""
