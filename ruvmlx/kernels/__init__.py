"""One Python wrapper per kernel, beside its plain twin. `library` finds the C library, `micro` calls it."""
