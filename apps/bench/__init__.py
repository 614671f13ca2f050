"""`ruvmlx bench`: what this machine does, next to what it could do and to what others do on it."""
