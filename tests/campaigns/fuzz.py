"""Inputs that coverage guides, for each kind of file and request.

    python -m tests.campaigns.fuzz gguf --seconds 3600
    python -m tests.campaigns.fuzz all --seconds 180        each target in turn

It needs `atheris` (`uv pip install atheris`), which no other test needs. A finding is anything but a result
or one line of error: another exception, a crash, 60 seconds, 2 GB. It stops the target, and the input is kept
in the folder --found; put it into tests/data/fuzz/TARGET, where test_fuzz.py tries it from then on. What
reached new code is kept in --corpus, for the next run.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FunctionType

from ruvmlx.errors import RuvmlxError

CASES = Path(__file__).parents[1] / "data" / "fuzz"  # a folder for each target
OPTIONS = ["-timeout=60", "-rss_limit_mb=2048", "-max_len=1000000", "-print_final_stats=1"]
NAMES = (
    "gguf", "safetensors", "config", "tokenizer-settings", "tokenizer", "template", "chat", "adapter",
    "backup", "schema", "http",
)  # fmt: skip


def is_accepted(run, data: bytes) -> bool:
    """Give an input to the target. Return whether the target accepts it. It may refuse it in one line. Any
    other exception is a finding."""
    try:
        run(data)
    except RuvmlxError as error:
        assert "\n" not in str(error) and str(error)
        return False
    return True


def fuzz(name: str, seconds: int, corpus: Path, found: Path) -> None:
    """Fuzz one target in this process, which ends with it."""
    try:
        import atheris
    except ImportError:
        sys.exit("this needs atheris, a fuzzer of Python code: `uv pip install atheris`")
    from .fuzz_targets import TARGETS

    with tempfile.TemporaryDirectory(prefix="ruvmlx-fuzz-") as folder:
        target = TARGETS[name](Path(folder))
        for function in functions():
            atheris.instrument_func(function)
        seeds = Path(folder, "seeds")
        seeds.mkdir()
        for n, seed in enumerate(target.seeds):
            (seeds / str(n)).write_bytes(seed)

        def mutant(data: bytes, size: int, seed: int) -> bytes:
            rng = random.Random(seed)
            made = target.mutant(data, rng) if rng.random() < 0.6 else atheris.Mutate(data, size)
            return made[:size]

        def take(data: bytes) -> None:
            is_accepted(target.run, data)

        (corpus / name).mkdir(parents=True, exist_ok=True)
        (found / name).mkdir(parents=True, exist_ok=True)
        options = [*OPTIONS, f"-max_total_time={seconds}", f"-artifact_prefix={found / name}/"]
        folders = [corpus / name, seeds, *([CASES / name] if (CASES / name).is_dir() else [])]
        command = [sys.argv[0], *options, *map(str, folders)]
        atheris.Setup(command, take, custom_mutator=mutant)
        atheris.Fuzz()


def functions() -> list[FunctionType]:
    """All functions and methods of ruvmlx that are loaded. (An import hook does not see those of an editable
    install.)"""
    found = dict[int, FunctionType]()
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "ruvmlx"]
    for module in modules:
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        for owner in [module, *(each for each in classes if each.__module__ == module.__name__)]:
            for value in vars(owner).values():
                value = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                    found[id(value)] = value
    return list(found.values())


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("target", choices=[*NAMES, "all"])
    parser.add_argument("--seconds", type=int, default=3600, help="of each target")
    parser.add_argument("--corpus", type=Path, default=Path("build/fuzz/corpus"))
    parser.add_argument("--found", type=Path, default=Path("build/fuzz/found"))
    given = parser.parse_args()
    if given.target != "all":
        fuzz(given.target, given.seconds, given.corpus.resolve(), given.found.resolve())
    for name in NAMES:
        again = ["--seconds", str(given.seconds), "--corpus", given.corpus, "--found", given.found]
        subprocess.run([sys.executable, "-m", "tests.campaigns.fuzz", name, *map(str, again)], check=False)


if __name__ == "__main__":
    main()
