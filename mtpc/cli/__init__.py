"""The command line: `mtpc run`, `inspect`, `doctor`. Only a command that runs imports torch."""
