"""`ruvmlx chat --server`: the chat app runs in the server, on the server's model; a client shows it.

    wire.py        what goes between the two
    client.py      the client: forwards keys to the server, and what the server sends to the terminal
    terminal.py    the client's terminal: its modes while the app is on it, and how it is left
    route.py       the server: takes connections
    connection.py  one connection's bytes, between the server's event loop and the app's thread
    attached.py    the app of one connection, in a thread of its own
    driver.py      makes the connection a terminal for Textual

The client imports neither Textual nor the model's libraries, so it starts at once.
"""
