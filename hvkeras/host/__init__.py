"""This machine: network, cores, memory, ports, files, and the console."""
