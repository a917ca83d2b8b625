"""This machine: network, cores, memory, GPUs, ports, files, and the console."""
