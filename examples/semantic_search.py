"""Find the texts that are closest in meaning to a question, even if their words differ.

python examples/semantic_search.py "how do I travel there" notes.txt        # a text on each line
"""

import sys
from pathlib import Path

import ruvmlx

if len(sys.argv) != 3:
    sys.exit("usage: python examples/semantic_search.py QUESTION TEXTS.txt")
question, file = sys.argv[1], Path(sys.argv[2])
texts = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]

with ruvmlx.open(adapter="none") as model:
    vectors = model.embed(texts)
    [wanted] = model.embed(question)


def similarity(vector: list[float]) -> float:
    """Return the dot product with the question's vector. Vectors have length 1, so equal texts give 1."""
    return sum(a * b for a, b in zip(vector, wanted, strict=True))


for score, text in sorted(zip(map(similarity, vectors), texts, strict=True), reverse=True)[:5]:
    print(f"{score:.2f}  {text}")
