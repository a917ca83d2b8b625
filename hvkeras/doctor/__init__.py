"""`hvkeras doctor`: whether training on several workers will work on this machine, or on these hosts, and what to do.

`software.py` looks at what is installed, `machine.py` at what the machine gives, `hosts.py` at several of them;
`command.py` is the command line, `finding.py` what they all speak of.
"""
