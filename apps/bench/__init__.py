"""This package implements the command `ruvmlx bench`. The command measures the speed, the memory and the
learning of ruvmlx. It compares the speeds with the limits of the machine, and with the speeds of other
runtimes on the same machine."""
