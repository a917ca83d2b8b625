"""The command `hvkeras`: parsers and printing; the packages below implement the subcommands."""
