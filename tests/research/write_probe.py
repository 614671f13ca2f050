"""Write the starter's KL probe and whitening into the package: a minute on two cores.

    python -m tests.research.write_probe

Run it again when calibration, the reference text, the questions of both or the starter change. After a
change of lora_a run `python -m tests.research.write_directions`, too.
"""

from ruvmlx.backends.select import open_backend
from ruvmlx.models.find.starter import starter_path
from ruvmlx.models.load import load_model
from ruvmlx.sona import calibration, embedding
from ruvmlx.sona.shipped import shipped_path


def main() -> None:
    model = load_model(str(starter_path()))
    backend = open_backend("native", model, None)
    probe = calibration.measure(backend, model.tokenizer, 2, model.shape.max_context)
    whitening = embedding.measure(backend, model.tokenizer)
    for kind, data in (("probes", probe.to_bytes(is_small=True)), ("whitenings", whitening.to_bytes())):
        path = shipped_path(kind, model.fingerprint)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        print(path)


if __name__ == "__main__":
    main()
