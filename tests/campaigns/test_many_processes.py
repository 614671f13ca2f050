"""A small sample of the campaign; many_processes.py is the whole."""

from contextlib import closing

from ruvmlx.models.load import load_model
from ruvmlx.store import Store

from .many_processes import campaign


def test_many_processes_rate_while_others_train_delete_and_serve(
    home, tiny_folder, tiny_whitening, whole_text, full
):
    with closing(Store(home / "ruvmlx.db")) as store:
        store.model_data.put_whitening(load_model(str(tiny_folder)).fingerprint, tiny_whitening)
    raters, count = (16, 60) if full else (4, 12)
    figures = campaign(home, tiny_folder, raters, count)
    assert len(figures.lines()) == 4
