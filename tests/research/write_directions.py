"""Write the directions of the starter's measures into the package: about 20 minutes on two cores.

    python -m tests.research.write_directions

Run it again when lora_a, the measures, the reference questions, the sampling or the starter change. The
shipped file has directions from 256 replies to each question, which a GPU wrote (tests/research/gpu). This
command replaces them by directions from REPLIES replies, for a machine without a GPU.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from ruvmlx.backends.select import open_backend
from ruvmlx.models.find.starter import starter_path
from ruvmlx.models.load import load_model
from ruvmlx.sona import calibration, measure_directions
from ruvmlx.sona.measure_directions import DirectionBank
from ruvmlx.sona.shipped import shipped_path

# A user's machine writes 16 replies to each question. The mean correlation of the head's directions with the
# measures of other replies is 0.463 with 64 replies to each question, 0.483 with 128 and 0.499 with 256
# (docs/studies.md, "The push").
REPLIES = 64


def answer(questions: dict[int, str]) -> dict[int, DirectionBank]:
    """Let the model write the replies to these questions, on one core. Return the bank of each question."""
    measure_directions.REPLIES = REPLIES
    measure_directions.TOGETHER = 32  # faster than small batches; nobody waits here
    model = load_model(str(starter_path()))
    backend = open_backend("native", model, 1)
    probe = calibration.measure(backend, model.tokenizer, 2, model.shape.max_context)
    lora_a, banks = np.ascontiguousarray(probe.directions[:, 0]), dict[int, DirectionBank]()
    for i, question in questions.items():
        banks[i] = DirectionBank(probe.tokens)
        banks[i].add(model, backend, question, lora_a, i, lambda: None)
        print(f"question {i}", flush=True)
    return banks


def banks_of_all() -> Iterator[DirectionBank]:
    """Yield the bank of each question in the order of the questions. Each core has a process of its own."""
    jobs, questions = os.cpu_count() or 1, dict(enumerate(measure_directions.questions()))
    parts = [{i: q for i, q in questions.items() if i % jobs == job} for job in range(jobs)]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        found = {i: bank for banks in pool.map(answer, parts) for i, bank in banks.items()}
    yield from (found[i] for i in sorted(found))


def main() -> None:
    whole: DirectionBank | None = None
    for bank in banks_of_all():
        whole = whole or DirectionBank(bank.tokens)
        whole.gradients += bank.gradients
        whole.measures += bank.measures
    assert whole is not None
    path = shipped_path("directions", load_model(str(starter_path())).fingerprint)
    path.write_bytes(whole.directions().to_bytes())
    print(path)


if __name__ == "__main__":
    main()
