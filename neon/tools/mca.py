#!/usr/bin/env python3
"""Estimate how fast the NEON loops of a matrix-vector product (GEMV) can read weights. The estimate converts
the cycles of llvm-mca to GB/s at 3.2 GHz.

    python neon/tools/mca.py [--clang clang-16] [--mca llvm-mca-16]

For each NEON implementation, the program compiles the product of one tile with one token of 16-bit
activations. It cuts out the innermost loop (32 columns of 16 rows, with scales), and lets llvm-mca schedule
200 rounds of this loop. LLVM's model apple-m1 is the model of the older core Cyclone, which is six
instructions wide and has three vector units. A real M1 is eight instructions wide and has four vector units.
The model assumes that every load hits the cache.
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
CLOCK = 3.2e9
MACHINES = {"M1": 68, "M4": 120, "M4 Pro": 273, "M1 Max": 400, "M4 Max": 546}  # memory bandwidth, GB/s
ROUNDS = 200
IMPLEMENTATIONS = {
    "neon": ("armv8-a", "smlal"),
    "neon_dotprod": ("armv8.2-a+dotprod", "sdot"),
    "neon_i8mm": ("armv8.2-a+dotprod+i8mm", "usmmla"),
}
PRODUCTS = {"smlal": 64, "sdot": 64, "usmmla": 32}  # the minimum number of these instructions in a round
# name -> kind of the weights, 1 if they have biases, bytes of 32 columns x 16 rows (groups of 32, halves as
# scales)
KINDS = {"q4": ("RVM_Q4", 1, 320), "q4 s": ("RVM_Q4", 0, 288), "q8 s": ("RVM_Q8", 0, 544)}
LOOP = """
#include "{source}/matrix_{impl}.c"
void gemv(const uint8_t *p, const uint8_t *act, float *y, size_t cols) {{
    const rvm_matrix_spec spec = {{{kind}, RVM_F16, {affine}, 32, 16, cols}};
    quantised_tile(&spec, p, act, 1, 0, 1, 2, {kind}, {affine}, y, 16, 16);
}}
"""


def assembly(clang: str, impl: str, kind: str, affine: int, folder: Path) -> list[str]:
    """Compile a call of the kernel, and return the assembly lines of its function gemv()."""
    code, out = folder / "loop.c", folder / "loop.s"
    code.write_text(LOOP.format(source=SOURCE, impl=impl, kind=kind, affine=affine))
    flags = ["-std=c11", "-O3", "-ffp-contract=off", "-w", f"-march={IMPLEMENTATIONS[impl][0]}"]
    where = ["-target", "aarch64-linux-gnu", "-I", SOURCE.parent / "include", "-S", code, "-o", out]
    subprocess.run([clang, *flags, *where], check=True)
    text = out.read_text()
    start = text.index("\ngemv:")
    return text[start : text.index(".Lfunc_end", start)].splitlines()


def innermost_loop(lines: list[str], instruction: str) -> list[str]:
    """Return the shortest loop that has all products of 16 rows x 32 columns. A loop goes from a label to a
    jump back to it."""
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\.L\w+):", line))}
    found = []
    for i, line in enumerate(lines):
        jump = re.match(r"\s+(?:b\.\w+|cbn?z|tbn?z)\s+(?:.*,\s*)?(\.L\w+)", line)
        if jump and labels.get(jump[1], i) < i:
            body = lines[labels[jump[1]] + 1 : i]
            if sum(bool(re.match(rf"\s+{instruction}2?\s", b)) for b in body) >= PRODUCTS[instruction]:
                found.append(body)
    return min(found, key=len)


def cycles(mca: str, cpu: str, body: list[str]) -> float:
    """Return the number of cycles of one round of the loop."""
    command = [mca, "-mtriple=aarch64", f"-mcpu={cpu}", "-mattr=+dotprod,+i8mm", f"-iterations={ROUNDS}"]
    done = subprocess.run(command, input="\n".join(body) + "\n", capture_output=True, text=True, check=True)
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    assert total, done.stdout
    return int(total[1]) / ROUNDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clang", default="clang")
    parser.add_argument("--mca", default="llvm-mca")
    parser.add_argument("--cpus", default="apple-m1,cortex-a76,neoverse-v1")
    args = parser.parse_args()
    machines = "  ".join(f"{name} ({rate})" for name, rate in MACHINES.items())
    print(f"GB/s of one core at {CLOCK / 1e9} GHz, then cores that fill the memory of: {machines}\n")
    print(f"{'loop':<20}{'model':<13}{'instr.':>7}{'cycles':>8}{'cycles/byte':>13}{'GB/s':>7}   cores")
    with tempfile.TemporaryDirectory() as folder:
        for impl, (_, instruction) in IMPLEMENTATIONS.items():
            for name, (kind, affine, nbytes) in KINDS.items():
                body = innermost_loop(assembly(args.clang, impl, kind, affine, Path(folder)), instruction)
                size = sum(bool(re.match(r"\s+[a-z]", line)) for line in body)
                for cpu in args.cpus.split(","):
                    n = cycles(args.mca, cpu, body)
                    rate = nbytes / n * CLOCK / 1e9
                    cores = "  ".join(f"{limit / rate:.1f}" for limit in MACHINES.values())
                    row = f"{impl + ' ' + name:<20}{cpu:<13}{size:>7}{n:>8.1f}{n / nbytes:>13.4f}{rate:>7.0f}"
                    print(f"{row}   {cores}")


if __name__ == "__main__":
    main()
