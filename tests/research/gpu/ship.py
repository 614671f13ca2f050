"""Write the directions that a GPU computed into the package: python -m tests.research.gpu.ship OUT"""

import sys
from pathlib import Path

import numpy as np

from ruvmlx.models.find.starter import starter_path
from ruvmlx.models.load import load_model
from ruvmlx.sona.measure_directions import MeasureDirections
from ruvmlx.sona.optional.style_basis import StyleBasis
from ruvmlx.sona.optional.style_file import StyleFiles
from ruvmlx.sona.shipped import shipped_path


def style_basis(found: dict[str, np.ndarray]) -> StyleBasis:
    """Return the style basis. Its information and its response come from replies to questions that were left
    out."""
    lora_a = found["lora_a"].astype(np.float32)
    count, _, rank = lora_a.shape
    along = found["rise"] / np.sqrt(np.maximum(1, found["tokens"]))[:, None]
    body = found["body"].astype(np.float32)
    return StyleBasis(
        lora_a,
        body.reshape(len(body), count, rank, -1),
        along.T @ along / len(along),
        found["measures"].T @ found["rise"] / len(along),
        tuple(range(count)),
    )


def main() -> None:
    with np.load(Path(sys.argv[1]) / "directions.npz") as file:
        found = {name: file[name] for name in file.files}
    fingerprint = load_model(str(starter_path())).fingerprint
    directions = MeasureDirections(found["movable"], found["head"].astype(np.float32))
    shipped_path("directions", fingerprint).write_bytes(directions.to_bytes())
    StyleFiles(fingerprint).ship(style_basis(found))


if __name__ == "__main__":
    main()
