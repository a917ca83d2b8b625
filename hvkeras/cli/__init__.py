"""The command `hvkeras`: parsers and printing; what the subcommands do is in the packages below."""
