"""The command line, `mtpc COMMAND`. Only a command that runs imports torch."""
