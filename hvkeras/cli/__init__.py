"""The command `hvkeras`: parsers and output; other packages implement the subcommands."""
