"""Write the directions of the starter's measures into the package. The work takes some minutes on two cores.

    python -m tests.research.write_directions

Run it again when lora_a, the measures, the reference questions or the starter change.
"""

import numpy as np

from ruvmlx.backends.select import open_backend
from ruvmlx.models.find.starter import starter_path
from ruvmlx.models.load import load_model
from ruvmlx.sona import calibration, measure_directions
from ruvmlx.sona.measure_directions import DirectionBank
from ruvmlx.sona.shipped import shipped_path


def main() -> None:
    measure_directions.TOGETHER = measure_directions.REPLIES  # faster; nobody waits here
    model = load_model(str(starter_path()))
    backend = open_backend("native", model, None)
    probe = calibration.measure(backend, model.tokenizer, 2, model.shape.max_context)
    bank, lora_a = DirectionBank(probe.tokens), np.ascontiguousarray(probe.directions[:, 0])
    for i, question in enumerate(measure_directions.questions()):
        bank.add(model, backend, question, lora_a, i, lambda: None)
        print(f"{i + 1} questions", flush=True)
    path = shipped_path("directions", model.fingerprint)
    path.write_bytes(bank.directions().to_bytes())
    print(path)


if __name__ == "__main__":
    main()
