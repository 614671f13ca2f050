"""Stream a reply, rate it, and ask again: the rating changes the next reply.

python examples/rated_stream.py "Why is the sky blue?"
"""

import sys

import ruvmlx

question = " ".join(sys.argv[1:]) or "Why is the sky blue?"

with ruvmlx.open() as model:

    def ask() -> ruvmlx.Reply:
        """Print a reply to the question piece by piece, and return the whole reply."""
        # the temperature 0 always takes the most likely token, so only the rating can change the reply
        stream = model.stream(question, temperature=0)
        for piece in stream:
            print(piece, end="", flush=True)
        print()
        return stream.reply

    reply = ask()
    rating = reply.rate("down", note="too long")
    print(
        f"\n-- rated down in {rating.seconds:.3f} s; this is the adapter's version {rating.adapter_version}\n"
    )
    ask()
    print(f"\n-- {model.learned().ratings} rating(s) so far; model.undo() removes the newest one")
