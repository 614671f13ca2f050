"""This module loads the style basis of the learner's model. If there is no basis, the module computes it."""

import math
import time
from collections.abc import Callable
from contextlib import suppress

from ...models.config.model import Model
from ...pausing import Pause
from ..learner import Learner
from .style_bank import BasisBuilder, StyleBank, texts
from .style_basis import StyleBasis
from .style_file import StyleFiles

SAVE_EVERY = 60.0  # seconds from one save of the bank to the next


class BasisSource:
    """The source of one model's style basis. Only the backend's thread can use this object."""

    def __init__(self, learner: Learner, model: Model):
        self._learner, self._model, self._files = learner, model, StyleFiles(model.fingerprint)
        self._basis: StyleBasis | None = None

    def basis(self, progress: Callable[[int, int, float], None], pause: Pause) -> StyleBasis:
        """Return the model's style basis. If there is no basis, compute it now. The computation takes
        minutes, once for each model."""
        self._basis = self._basis or self._files.basis()
        if self._basis is None:
            self._basis = self._compute(progress, pause)
            with suppress(OSError):  # a full disk: this process has the basis, and the next one computes it
                self._files.put_basis(self._basis)
        return self._basis

    def _compute(self, progress: Callable[[int, int, float], None], pause: Pause) -> StyleBasis:
        bank, saved = self._files.bank(), time.monotonic()

        def show(_: str, done: int, total: int) -> None:
            nonlocal saved
            progress(done, total, math.nan)
            if time.monotonic() - saved > SAVE_EVERY:
                self._save(bank)
                saved = time.monotonic()

        self._learner.release()
        self._learner.room.check()
        questions, prose = texts("style_questions"), texts("style_prose")
        try:
            return BasisBuilder(self._model, self._learner.backend, bank, questions, prose).run(show, pause)
        except BaseException:
            self._save(bank)
            raise

    def _save(self, bank: StyleBank) -> None:
        """Store the unfinished bank. On a full disk, only a later process loses what is finished."""
        with suppress(OSError):
            self._files.put_bank(bank)
