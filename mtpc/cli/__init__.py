"""The command line, `mtpc COMMAND`. `--help` imports no torch."""
