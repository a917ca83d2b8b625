"""`hvkeras doctor`: checks whether multi-worker training will work on this machine or on several hosts.

`software.py` checks what is installed, `machine.py` checks the resources of the machine, and `hosts.py` checks several
hosts; `command.py` is the command line, and `finding.py` defines the result of a check.
"""
