"""This package has the server that `ruvmlx serve` starts. The server lets other programs use the model over
HTTP, in OpenAI's form. The model learns from ratings.

web.py accepts connections. gate.py checks each request by the rules of access.py. dispatch.py runs one
endpoint for one request. Each group of endpoints has a file of its own, and app.py lists them. serving.py
keeps the state of the model, which `ruvmlx/host/host.py` runs.
"""
