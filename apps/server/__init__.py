"""This package has the server that `ruvmlx serve` starts. Other programs use the model over HTTP, in the
forms of OpenAI, Anthropic, ollama and llama.cpp. The model learns from the ratings that these programs send.

web.py accepts connections. gate.py checks each request by the rules of access.py. dispatch.py runs one
endpoint for one request. Each group of endpoints has a file of its own, and app.py lists them. serving.py
keeps the state of one model; `ruvmlx/host/host.py` runs the model.
"""
