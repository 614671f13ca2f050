"""This package has the code of `ruvmlx chat --server`. With this command, the chat app runs in the server
process and uses the server's model. A client in the user's terminal forwards the user's keys to the app, and
shows on the terminal what the app draws.

    wire.py        the messages between client and server
    client.py      the client, which forwards keys to the server and the app's output to the terminal
    terminal.py    the client's terminal: it sets the modes for the app and restores the terminal
    route.py       the server's side, which accepts connections
    connection.py  the queue in which the app's output waits for the server's event loop
    attached.py    the app of one connection, in a separate thread
    driver.py      the Textual driver that uses the connection as a terminal

The client imports neither Textual nor the libraries of models, so the client starts fast.
"""
