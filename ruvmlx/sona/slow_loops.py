"""This module runs the slow loops of one learner: the background loop (background.py) or the style loop
(optional/style_loop.py), and the deep loop (deep.py).

A loop's module is imported only at its first use, because the import starts MLX. Before the deep loop begins,
the background loop is closed, so that its training graph (the graph that computes gradients) takes no memory.
"""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..models.config.model import Model
from ..settings import BASE_TARGETS
from .adapter_history import DUE, MINIMUM, STYLE_DUE
from .learner import Learner

if TYPE_CHECKING:
    from .background import Background, TrainingSettings
    from .deep import Deep
    from .optional.style_loop import StyleLoop

AUTO, TRAINING, STYLE = "auto", "training", "style"


def loop_of_setting(value: str, fingerprint: str) -> str:
    """Return the slow loop of a model, STYLE or TRAINING, at a value of the setting `slow_loop`. AUTO means
    STYLE if the package or the data folder has a style basis of the model, and else TRAINING."""
    from .optional.style_file import StyleFiles

    if value != AUTO:
        return value
    return STYLE if StyleFiles(fingerprint).has_basis else TRAINING


def new_ratings_for(loop: str) -> int:
    """Return the number of new ratings after which the slow loop STYLE or TRAINING starts."""
    return STYLE_DUE if loop == STYLE else DUE


class Loops:
    def __init__(
        self, learner: Learner, model: Model, slow_loop: str = AUTO, base_targets: str = BASE_TARGETS
    ):
        """Make the object that runs the slow loops of `learner`.

        slow_loop: the loop that `consolidate` runs: TRAINING (the background loop), STYLE (the style loop),
            or AUTO (`loop_of_setting`)
        base_targets: the matrices that the background loop trains, in the form of the setting
        """
        self._learner, self._model = learner, model
        self._slow_loop = loop_of_setting(slow_loop, model.fingerprint)
        self._base_targets = base_targets
        self._style: StyleLoop | None = None
        self._background: Background | None = None
        self._deep: Deep | None = None

    def consolidate(
        self,
        progress: Callable[[int, int, float], None] | None = None,
        cancel: threading.Event | None = None,
        settings: "TrainingSettings | None" = None,
    ) -> dict[str, Any]:
        """Run the background or the style loop, and return a report. Before, run the deep loop if it is due.

        settings: the settings of a training that the user asked for; None to run the loop `slow_loop` with
        the settings of the last call in this process, or else with its default settings
        """
        loop: Background | StyleLoop
        anchor, deep_report = False, None
        if self._slow_loop == STYLE and settings is None:
            loop = self.style()
        else:
            loop = self.background(settings)
            anchor = loop.settings.ewc > 0
        # The deep loop runs first, because the background loop can replace the weights that the deep loop
        # measures.
        if self._model.is_own and self.deep().why_due():
            deep_report = self.deepen(None, cancel, anchor)
            if cancel is not None and cancel.is_set():  # after a cancel, do not begin the slow loop
                return {"promoted": False, "reason": deep_report["reason"], "deep": deep_report}
        report = loop.run(progress, cancel)
        return report | {"deep": deep_report} if deep_report else report

    def deepen(
        self,
        progress: Callable[[int, int], None] | None = None,
        cancel: threading.Event | None = None,
        anchor: bool = True,
    ) -> dict[str, Any]:
        if self._background is not None:
            self._background.close()
        self._learner.release()
        return self.deep().run(progress, cancel, anchor)

    def is_due(self) -> bool:
        """Return True if the model can be trained and there is work for `consolidate`: enough new ratings or
        preferences, a stopped run in memory, or a deep loop that is due. After a run that found too little
        memory, return False for a while."""
        if not self._model.is_own or time.monotonic() < self._learner.room.next_try:
            return False
        if self._background is not None and self._background.is_paused:
            return True
        history = self._learner.history
        # The import of the deep loop starts MLX. So `why_due` is called only if there are at least MINIMUM
        # ratings.
        return (history.trains and self.missing() == 0) or (
            len(history.ratings()) >= MINIMUM and bool(self.deep().why_due())
        )

    def missing(self) -> int:
        """Return how many more ratings or preferences the loop that `consolidate` runs waits for."""
        return self._learner.history.new_and_missing(new_ratings_for(self._slow_loop))[1]

    def close(self) -> None:
        """Save stopped runs in the store, and free the training graphs."""
        for loop in (self._background, self._deep):
            if loop is not None:
                loop.close()
        self._background = self._deep = self._style = None

    def deep(self) -> "Deep":
        from .deep import Deep

        if self._deep is None:
            self._deep = Deep(self._learner, self._model)
        return self._deep

    def style(self) -> "StyleLoop":
        from .optional.style_loop import StyleLoop

        if self._style is None:
            self._style = StyleLoop(self._learner, self._model)
        return self._style

    def background(self, settings: "TrainingSettings | None" = None) -> "Background":
        from .background import Background, TrainingSettings

        if settings is None and self._background is None:
            settings = TrainingSettings(targets=self._base_targets)
        if self._background is not None and settings not in (None, self._background.settings):
            self._background.close()
            self._background = None
        self._learner.release()
        if self._background is None:
            self._background = Background(self._learner, self._model, settings)
        return self._background
