"""This package implements the command `ruvmlx bench`. The command measures speeds of ruvmlx, and compares
these speeds with the limits of the machine, and with the speeds of other runtimes on the same machine."""
