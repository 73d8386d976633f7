"""Glue: the subcommands of the command line, one module each."""
