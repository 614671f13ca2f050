"""`ruvmlx doctor --export-metal DIR`: a file for each kernel and template value."""

import json

import pytest
from click.testing import CliRunner
from ruvmlx.apps.cli import cli

from ruvmlx.backends.mlx.kernels import decode, export
from ruvmlx.backends.mlx.kernels.source import HEAD_DIMS, folder
from ruvmlx.errors import RuvmlxError, UsageError
from ruvmlx.platform.mx import mx

from .kernels import CUDA_ONLY, KERNELS


def doctor(*arguments):
    return CliRunner().invoke(cli, ["doctor", "--export-metal", *map(str, arguments)])


def test_one_file_each(tmp_path):
    """Names tell kernel and values; the folder is made."""
    done = doctor(tmp_path / "new" / "folder")
    names = {file.name for file in (tmp_path / "new" / "folder").iterdir()}
    assert done.output == f"{len(names)} Metal sources in {tmp_path / 'new' / 'folder'}\n"
    shapes = [(d, g) for d in HEAD_DIMS for g in range(1, 9) if d < 256 or g <= 4]
    assert {f"attend_decode-D{d}-G{g}.metal" for d, g in shapes} <= names
    kinds = [(form, kind) for form in (0, 1) for kind in ("float32", "float16", "bfloat16")]
    assert {f"append-D64-TRADITIONAL{form}-T{kind}.metal" for form, kind in kinds} <= names
    assert {"demote-D80-TO0.metal", "demote-D80-TO1.metal"} <= names
    assert len(names) == sum(len(kernel.values) for kernel in export.KERNELS)


def test_json_lists_the_exported_files(tmp_path):
    found = json.loads(doctor(tmp_path, "--json").output)
    assert found["folder"] == str(tmp_path)
    assert sorted(found["files"]) == sorted(file.name for file in tmp_path.iterdir())


def test_a_report_is_not_forgotten(tmp_path):
    """The command writes Metal sources in place of its checks, so it has nothing to report."""
    done = doctor(tmp_path / "folder", "--report", tmp_path / "r.md")
    assert isinstance(done.exception, UsageError) and "do not go together" in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_a_file_is_what_mlx_compiles(tmp_path, capfd):
    """The text that MLX itself prints when it is asked to be verbose, after a comment and the preamble."""
    doctor(tmp_path)
    kernel, chosen = decode.ATTEND, (80, 3)
    inputs = [mx.zeros(64, kernel.dtypes(chosen)[c_type]) for _, c_type in kernel.inputs]
    capfd.readouterr()

    def call(*arrays):
        arguments = kernel.arguments(arrays, [(64,)] * 2, (2, 1, 1), chosen)
        return export.for_metal(kernel)(**arguments, verbose=True)

    mx.export_function(str(tmp_path / "kernel.mlxfn"), call, *inputs)
    printed = capfd.readouterr().out
    text = (tmp_path / "attend_decode-D80-G3.metal").read_text()
    head, _, rest = text.partition("#endif\n\n")
    assert rest.strip() == printed[printed.index("```\n") + 4 : printed.rindex("```")].strip()
    assert head.startswith("// attend_decode-D80-G3:") and "using namespace metal;" in head


@pytest.mark.parametrize("inside", ["", "deeper"])
def test_where_it_cannot_write(tmp_path, inside):
    """A file in the folder's place: one line, and what to do."""
    (tmp_path / "file").write_text("mine")
    done = doctor(tmp_path / "file" / inside)
    assert isinstance(done.exception, RuvmlxError) and "Name a folder" in str(done.exception)
    assert "\n" not in str(done.exception)
    assert (tmp_path / "file").read_text() == "mine"


def test_every_body_is_exported():
    """A kernel that is not in the list would never be seen by a compiler."""
    bodies = {file.name for file in folder().glob("*.metal")}
    assert bodies - {kernel.file for kernel in CUDA_ONLY} == {kernel.file for kernel in export.KERNELS}
    for kernel, chosen in KERNELS.items():
        assert chosen and set(chosen) <= set(kernel.values)
