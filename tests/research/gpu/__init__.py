"""Studies of the starter model that need tens of thousands of replies. They run on a GPU, with JAX.

    uv run python -m tests.research.gpu.inputs DATA               # here: the inputs of the computation
    python3 -m tests.research.gpu.directions STARTER DATA OUT     # there: with JAX, NumPy and this checkout
    uv run python -m tests.research.gpu.ship OUT                  # here: the results become package data

`llama.py` is a Llama decoder in JAX, with the chat's sampling and the gradients of replies. The package
itself does not use JAX.
"""
