"""This package runs one model over several processes. The processes can be on several machines. A process has
a number, its rank; rank 0 is the process of the user."""
