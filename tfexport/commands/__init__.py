"""The commands of the command line: flags, input, output and messages."""
