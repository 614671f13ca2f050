"""`ruvmlx serve`: other programs ask the model that learns over HTTP, in OpenAI's form.

web.py takes connections; gate.py checks who asks (access.py); dispatch.py runs one endpoint for one
request; the endpoints are in files of their own, listed in app.py. serving.py has the model, which
`ruvmlx/host/host.py` runs.
"""
