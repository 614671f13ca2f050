"""This package is `ruvmlx chat --server`. The chat app runs in the server, on the server's model. A client in
the user's terminal forwards keys to the app and shows what the app draws.

    wire.py        the messages between client and server
    client.py      the client, which forwards keys to the server and the app's output to the terminal
    terminal.py    the client's terminal: it sets the modes for the app and restores the terminal
    route.py       the server's side, which accepts connections
    connection.py  the output of one app, on its way from the app's thread to the server's event loop
    attached.py    the app of one connection, in a separate thread
    driver.py      the Textual driver that uses the connection as a terminal

The client imports neither Textual nor the libraries of models, so it starts at once.
"""
