"""Teach two adapters opposite ratings, and choose the adapter for each reply.

python examples/adapter_per_reply.py "What is a lake?"
"""

import sys

import ruvmlx

question = " ".join(sys.argv[1:]) or "What is a lake?"
LESSONS = ["What is a river?", "What is a forest?", "What is a mountain?"]

with ruvmlx.open() as model:
    for adapter, rating in {"praised": "up", "blamed": "down"}.items():
        model.use_adapter(adapter)  # a new name begins with the original model
        for lesson in LESSONS:
            model.reply(lesson, temperature=0).rate(rating)

    # the adapters are now in the store: any later reply can name one of them
    for name in [None, "praised", "blamed"]:
        reply = model.reply(question, adapter=name, temperature=0)
        print(f"[{name or 'the original model'}] {reply.text}\n")
