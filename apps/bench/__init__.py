"""This package implements the command `ruvmlx bench`. It measures speeds of ruvmlx. It compares them with the
limits of the machine, and with the speeds of other runtimes on the same machine."""
