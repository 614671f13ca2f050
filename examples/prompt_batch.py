"""Answer every line of a file, and write one JSON line for each answer.

python examples/prompt_batch.py questions.txt answers.jsonl

The replies come one after another. The command `ruvmlx generate --prompts` writes up to 64 at the same time,
and continues an unfinished file.
"""

import json
import sys
from pathlib import Path

import ruvmlx

if len(sys.argv) != 3:
    sys.exit("usage: python examples/prompt_batch.py QUESTIONS.txt ANSWERS.jsonl")
try:
    questions = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
except OSError as error:
    sys.exit(f"cannot read the questions: {error}")

with ruvmlx.open() as model, Path(sys.argv[2]).open("w", encoding="utf-8") as out:
    for number, line in enumerate(questions):
        if not line.strip():
            continue
        # with a seed for each line, a second run writes the same answers
        reply = model.reply(line, seed=number, max_tokens=200)
        answer = {"prompt": line, "text": reply.text, "id": reply.id, "finish_reason": reply.finish_reason}
        print(json.dumps(answer, ensure_ascii=False), file=out, flush=True)
        print(f"line {number + 1}: {reply.generation_tokens} tokens, {reply.generation_tps:.0f} tokens/s")
