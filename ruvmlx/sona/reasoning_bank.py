"""The reasoning bank holds rated questions, finds the questions that are similar to a new question, and
groups the rated questions into patterns.

An entry is a question's unit vector with a label (a rating, or implicit feedback). k-means divides the
entries into cells. Cells with nearly the same centre form one pattern. A lookup compares the new question
(the query) with the cells' centres, then with the entries of the nearest cells, up to SCAN entries. The
vectors of a cell are contiguous rows, so one kernel call compares the query with a cell. The rows of new
entries come after the rows of all cells. Every lookup compares the query with the new entries, until `tend`
sorts them into cells. With at most SCAN entries, a lookup is exact. `RatingIndex.sync` fills the bank from
the store.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .signal import INDEX, LABELS, WEIGHTS, rewards

# The maximum number of entries in lookups. If there are more, `tend` removes entries of poor patterns first,
# then the oldest entries.
CAPACITY = 10_000
CELLS = 100  # the maximum number of cells
SAMPLE = 4096  # the maximum number of entries from which k-means computes the cells
SCAN = 1024  # the maximum number of entries that a lookup compares, besides new entries
TAIL = 128  # the maximum number of new entries that wait before `tend` sorts them into cells
# V(x) is the mean reward of at most this number of questions that are the most similar to the question x.
NEIGHBOURS = 32
PRIOR = 4.0  # the weight of the prior of V(x) (`value`), as a number of ratings
ALIKE = 0.5  # the minimum similarity at which a question has its full weight in V(x)
SIMILAR = 0.1  # the minimum similarity of an example; 84% of pairs on one topic reach it, 19% of other pairs
MERGE = 0.9  # the minimum similarity of the centres of two cells that form one pattern
PRUNE = 0.3  # a pattern with a lower quality is poor
_ITERATIONS = 8
_DEAD = -1
_ANY = np.array([True] * len(LABELS) + [False])
_GOOD = np.isin(LABELS, ("up", "4", "5"))


@dataclass(frozen=True)
class Pattern:
    """A kind of question. quality: the mean reward, 0 to 1. hits: how often its replies became examples."""

    size: int
    quality: float
    hits: int

    @property
    def poor(self) -> bool:
        """True if the quality is below PRUNE. Entries of poor patterns are pruned first."""
        return self.quality < PRUNE


@dataclass(frozen=True)
class Tidied:
    """The result of `tidy`.

    patterns: the number of patterns that are left
    merged: the number of cells that joined another cell's pattern
    pruned: the number of patterns that were removed
    entries: {reply id: label} of the removed patterns' entries
    """

    patterns: int
    merged: int
    pruned: int
    entries: dict[str, str]


@dataclass(frozen=True)
class Neighbours:
    """The entries that are most similar to a query, the most similar first: their rows and similarities."""

    rows: np.ndarray
    similarity: np.ndarray


class ReasoningBank:
    """The reasoning bank of one adapter. The key of an entry is the reply's id. Vectors are float32
    [dimensions] of length 1."""

    def __init__(self, dimensions: int):
        self._vectors = np.zeros((64, dimensions), np.float32)
        self._labels = np.full(64, _DEAD, np.int8)
        self._pattern = np.zeros(64, np.int16)
        self._hits = np.zeros(64, np.int64)
        self._order = np.zeros(64, np.int64)  # serial numbers of entries, in the order of arrival
        self._came = 0
        self._ids: list[str] = []
        self._at: dict[str, int] = {}
        # Labels of entries that lookups do not find (pruned, or without a vector); `counts` includes these.
        self._unplaced: dict[str, int] = {}
        self.counts = np.zeros(len(LABELS), np.int64)
        self._centres = np.zeros((0, dimensions), np.float32)
        self._starts = np.zeros(1, np.int64)  # cell c has the rows [starts[c], starts[c + 1])
        self._pattern_of = np.zeros(1, np.int16)  # the pattern of each cell
        self._tally = np.zeros((1, len(LABELS)), np.int64)  # numbers of entries by pattern and label
        self._clustered = 0  # the number of entries at the last k-means

    def __len__(self) -> int:
        return len(self._at) + len(self._unplaced)

    def labels(self) -> dict[str, str]:
        """Return the labels of all entries by reply id."""
        held = {reply_id: int(self._labels[row]) for reply_id, row in self._at.items()} | self._unplaced
        return {reply_id: LABELS[i] for reply_id, i in held.items()}

    def vector(self, reply_id: str) -> np.ndarray | None:
        """Return an entry's vector [dimensions]; None if the entry has no vector."""
        row = self._at.get(reply_id)
        return None if row is None else self._vectors[row].copy()

    # -- entries -------------------------------------------------------------------------------------

    def put(self, reply_id: str, label: str, vector: np.ndarray | None) -> None:
        """Add an entry, or change the label of an entry that the bank has."""
        if reply_id in self._at:
            self._relabel(self._at[reply_id], INDEX[label])
            return
        self.remove(reply_id)
        if vector is None:
            self._unplaced[reply_id] = INDEX[label]
            self.counts[INDEX[label]] += 1
        else:
            self._append(reply_id, INDEX[label], vector)

    def _relabel(self, row: int, label: int) -> None:
        """Change the label of a row, and the counts of labels. The label _DEAD marks the row as removed."""
        for old_or_new, change in ((int(self._labels[row]), -1), (label, 1)):
            if old_or_new != _DEAD:
                self.counts[old_or_new] += change
                self._tally[self._pattern[row], old_or_new] += change
        self._labels[row] = label

    def _append(self, reply_id: str, label: int, vector: np.ndarray) -> None:
        row = len(self._ids)
        if row == len(self._labels):
            self._grow()
        self._vectors[row], self._labels[row], self._hits[row] = vector, _DEAD, 0
        self._order[row] = self._came = self._came + 1
        cell = int(np.argmax(np.vecdot(self._centres, vector))) if len(self._centres) else 0
        self._pattern[row] = self._pattern_of[cell]
        self._relabel(row, label)
        self._ids.append(reply_id)
        self._at[reply_id] = row

    def _grow(self) -> None:
        n = len(self._labels)
        self._vectors, self._labels = _with_more_rows(self._vectors), _with_more_rows(self._labels)
        self._pattern, self._hits = _with_more_rows(self._pattern), _with_more_rows(self._hits)
        self._order, self._labels[n:] = _with_more_rows(self._order), _DEAD

    def remove(self, reply_id: str) -> None:
        """Remove an entry. An unknown reply id is no error."""
        if reply_id in self._at:
            self._relabel(self._at.pop(reply_id), _DEAD)  # lookups skip the row; `tend` frees it
        elif reply_id in self._unplaced:
            self.counts[self._unplaced.pop(reply_id)] -= 1

    # -- lookup --------------------------------------------------------------------------------------

    def lookup(self, query: np.ndarray, k: int = NEIGHBOURS, among: np.ndarray = _ANY) -> Neighbours:
        """Return the k (or fewer) entries that are most similar to a query [dimensions]. The result is exact
        if the bank has at most SCAN entries; else it is approximate.

        among: [len(LABELS) + 1], a mask of the labels to look for; its last item is for removed entries
        """
        rows, similarity = self._similarities(query)
        similarity[~among[self._labels[rows]]] = -2.0
        best = np.argpartition(similarity, -k)[-k:] if len(rows) > k else np.arange(len(rows))
        best = best[np.argsort(-similarity[best], kind="stable")]
        best = best[similarity[best] > -2.0]
        return Neighbours(rows[best], similarity[best])

    def _similarities(self, query: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the entries that a lookup compares, and their similarities to the query."""
        n, starts = len(self._ids), self._starts
        if n <= SCAN:
            return np.arange(n), np.vecdot(self._vectors[:n], query)
        spans, left = [(int(starts[-1]), n)], SCAN  # the first span is the new entries
        for c in np.argsort(-np.vecdot(self._centres, query)):
            first, last = int(starts[c]), int(starts[c + 1])
            spans.append((first, min(last, first + left)))
            left -= last - first
            if left <= 0:
                break
        rows = np.concatenate([np.arange(a, b) for a, b in spans])
        similarity, at = np.empty(len(rows), np.float32), 0
        for a, b in spans:  # use vecdot, because the operator @ wakes BLAS's threads: 8 ms if no core is free
            np.vecdot(self._vectors[a:b], query, out=similarity[at : at + b - a])
            at += b - a
        return rows, similarity

    def value(self, query: np.ndarray | None, without: str | None = None) -> float:
        """Return V(x) in [-1, 1]: the mean reward of similar questions, shrunk towards the mean of all
        questions, which is itself shrunk towards zero.

            V0 = sum_i w_i r_i / (sum_i w_i + PRIOR)
            V  = (sum_near a_i r_i + PRIOR V0) / (sum_near a_i + PRIOR),   a_i = w_i clip(s_i / ALIKE, 0, 1)^2
        For entry i, w is 1 for a rating and less for implicit feedback; r is the reward; s is the similarity
        to the query. "near": the NEIGHBOURS nearest entries (no query: none). without: a left-out reply's id.
        """
        counts = self.counts_without(without)
        r = rewards(counts)
        overall = float((counts * WEIGHTS) @ r / (counts @ WEIGHTS + PRIOR))
        if query is None or not self._at:
            return overall
        near = self.lookup(query, NEIGHBOURS + 1)
        keep = near.rows != self._at.get(without or "", -1)
        rows, similarity = near.rows[keep][:NEIGHBOURS], near.similarity[keep][:NEIGHBOURS]
        labels = self._labels[rows]
        a = WEIGHTS[labels] * np.clip(similarity / ALIKE, 0, 1) ** 2
        return float((a @ r[labels] + PRIOR * overall) / (a.sum() + PRIOR))

    def counts_without(self, reply_id: str | None) -> np.ndarray:
        """Return the number of entries with each label [len(LABELS)], without one reply's entry."""
        row = self._at.get(reply_id or "")
        label = int(self._labels[row]) if row is not None else self._unplaced.get(reply_id or "")
        counts = self.counts.copy()
        if label is not None:
            counts[label] -= 1
        return counts

    def liked_replies(self, query: np.ndarray, k: int = NEIGHBOURS, similar: float = SIMILAR) -> list[str]:
        """Return the ids of at most k liked replies to similar questions, the most similar first.

        A reply is liked if its reward is at least 0.5. A reply with up, 4 or 5 stars is also liked if its
        reward is at least 0. Implicit feedback is not used.
        """
        r = rewards(self.counts)
        liked = (WEIGHTS == 1) & ((r >= 0.5) | (_GOOD & (r >= 0)))
        found = self.lookup(query, k, np.append(liked, False))
        return [self._ids[row] for row in found.rows[found.similarity >= similar]]

    # -- patterns ------------------------------------------------------------------------------------

    def hit(self, reply_id: str) -> None:
        """Count that an entry's reply became an example in a prompt."""
        if reply_id in self._at:
            self._hits[self._at[reply_id]] += 1

    @property
    def hits(self) -> int:
        return int(self._hits[: len(self._ids)].sum())

    def patterns(self) -> list[Pattern]:
        """Return the current patterns. The quality of a pattern is the weighted mean reward, scaled to
        0..1."""
        every = np.arange(len(self._tally))
        live = np.fromiter(self._at.values(), np.int64, len(self._at))
        hits = np.bincount(self._pattern[live], self._hits[live], len(every))
        facts = zip(self._tally.sum(axis=1), self._quality(every), hits, strict=True)
        return [Pattern(int(size), float(quality), int(hits)) for size, quality, hits in facts if size]

    def _quality(self, patterns: np.ndarray) -> np.ndarray:
        """Return the quality of some patterns, 0 to 1 each."""
        weight = self._tally[patterns] * WEIGHTS
        mean = weight @ rewards(self.counts) / np.maximum(weight.sum(axis=1), 1e-9)
        return (mean + 1) / 2

    def tend(self) -> bool:
        """Sort the entries into cells if more than TAIL new entries wait or many were removed. Compute new
        cells first if the bank has grown by a quarter or shrunk by half since the last k-means. Return True
        if entries were sorted. Call this in idle time.
        """
        live, n = len(self._at), len(self._ids)
        waiting = n - int(self._starts[-1]) > TAIL or n - live > max(TAIL, live // 4)
        due = live >= 8 and (live > 1.25 * self._clustered or live < 0.5 * self._clustered)
        if not (due or waiting):
            return False
        rows = self._prune_rows(np.fromiter(self._at.values(), np.int64, live))
        live = len(rows)
        if due:
            self._cluster(rows)
        self._sort(rows)
        return True

    def tidy(self, pause: Callable[[], None] | None = None) -> Tidied:
        """Make new cells, merge similar cells into patterns, and prune the entries of poor patterns. The deep
        loop calls this function.

        Pruned entries still influence rewards, but lookups skip them. If `pause` raises an exception, the
        bank stays unchanged.
        """
        rows = np.fromiter(self._at.values(), np.int64, len(self._at))
        if len(rows) == 0:
            return Tidied(0, 0, 0, {})
        self._cluster(rows, pause)
        self._sort(rows)
        every = np.arange(len(self._tally))
        poor = (self._quality(every) < PRUNE) & (self._tally.sum(axis=1) > 0)
        gone = np.flatnonzero(poor[self._pattern[: len(rows)]])
        entries = {self._ids[row]: LABELS[self._labels[row]] for row in gone}
        for row in gone:
            self._unplace(int(row))
        self._sort(np.fromiter(self._at.values(), np.int64, len(self._at)))
        return Tidied(len(self.patterns()), len(self._centres) - len(every), int(poor.sum()), entries)

    def _cluster(self, rows: np.ndarray, pause: Callable[[], None] | None = None) -> None:
        """Compute new cells and patterns from the entries in these rows. Then the caller must call
        `_sort`."""
        live = len(rows)
        sample = rows[:: -(-live // SAMPLE)]
        k = min(CELLS, max(int(np.ceil(np.sqrt(min(live, SCAN)))), live // CELLS))
        self._centres = clusters(self._vectors[sample], k, pause)
        self._pattern_of = join_cells(self._centres)
        self._clustered = live

    def is_placed(self, reply_id: str) -> bool:
        """Return True if lookups can find this entry."""
        return reply_id in self._at

    def _unplace(self, row: int) -> None:
        """Remove an entry from lookups, but keep its label in the counts."""
        reply_id, label = self._ids[row], int(self._labels[row])
        self.remove(reply_id)
        self._unplaced[reply_id] = label
        self.counts[label] += 1

    def _prune_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return at most CAPACITY of the rows, and remove the other rows from lookups: first the rows of poor
        patterns, then the oldest rows."""
        poor = self._quality(self._pattern[rows]) < PRUNE
        order = np.lexsort((self._order[rows], ~poor))
        excess = max(0, len(rows) - CAPACITY)
        for row in rows[order[:excess]]:
            self._unplace(int(row))
        return rows[np.sort(order[excess:])]

    def _sort(self, rows: np.ndarray) -> None:
        """Arrange the entries of these rows in the order of their cells, and forget all other rows."""
        some = len(self._centres) > 0
        cell = nearest(self._vectors[rows], self._centres) if some else np.zeros(len(rows), np.int64)
        order = np.argsort(cell, kind="stable")
        rows, cell, n = rows[order], cell[order], len(rows)
        self._ids = [self._ids[row] for row in rows]
        self._at = {reply_id: row for row, reply_id in enumerate(self._ids)}
        for column in (self._vectors, self._labels, self._hits, self._order):
            column[:n] = column[rows]
        self._labels[n:], self._pattern[:n] = _DEAD, self._pattern_of[cell]
        self._starts = np.searchsorted(cell, np.arange(max(1, len(self._centres)) + 1))
        self._tally = np.zeros((int(self._pattern_of.max()) + 1, len(LABELS)), np.int64)
        np.add.at(self._tally, (self._pattern[:n], self._labels[:n]), 1)


def _with_more_rows(rows: np.ndarray) -> np.ndarray:
    """Return the rows, then as many rows of zeros. The zeros take no memory until a caller writes to them."""
    longer = np.zeros((2 * len(rows), *rows.shape[1:]), rows.dtype)
    longer[: len(rows)] = rows
    return longer


def nearest(vectors: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Return the index of the centre that is nearest to each vector: [n, E], [k, E] -> [n]."""
    return np.concatenate(
        [np.argmax(vectors[i : i + 1024] @ centres.T, axis=1) for i in range(0, len(vectors), 1024)]
        or [np.zeros(0, np.int64)]
    )


def clusters(vectors: np.ndarray, k: int, pause: Callable[[], None] | None = None) -> np.ndarray:
    """Return the centres [at most k, E] of a spherical k-means of n vectors [n, E] of E numbers. The centres
    have length 1. The seed is fixed, so the result is deterministic."""
    pause = pause or (lambda: None)
    centres = _initial_centres(vectors, k, pause)
    for _ in range(_ITERATIONS):
        pause()
        centres = _means(vectors, nearest(vectors, centres))
    return centres


def _initial_centres(vectors: np.ndarray, k: int, pause: Callable[[], None]) -> np.ndarray:
    """Draw the first centres by k-means++: the probability of a vector is proportional to its distance from
    the nearest centre so far."""
    rng = np.random.Generator(np.random.PCG64(0))
    chosen = [int(rng.integers(len(vectors)))]
    distance = 1 - np.vecdot(vectors, vectors[chosen[0]])
    while len(chosen) < min(k, len(vectors)):
        pause()
        mass = np.cumsum(np.maximum(distance, 0) + 1e-9)
        chosen.append(int(np.searchsorted(mass, rng.random() * mass[-1])))
        distance = np.minimum(distance, 1 - np.vecdot(vectors, vectors[chosen[-1]]))
    return vectors[chosen]


def _means(vectors: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return each cell's mean vector, scaled to length 1, without empty cells. at: each vector's cell."""
    order = np.argsort(at, kind="stable")
    _, starts = np.unique(at[order], return_index=True)
    sums = np.add.reduceat(vectors[order], starts, axis=0)
    return sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-9)


def join_cells(centres: np.ndarray) -> np.ndarray:
    """Return the pattern of each cell: [k] int16. Two cells share a pattern if the similarity of their
    centres exceeds MERGE, or if a chain of such pairs connects the two cells."""
    pattern = np.arange(len(centres))
    for a, b in np.argwhere(np.triu(centres @ centres.T > MERGE, 1)):
        pattern[pattern == pattern[b]] = pattern[a]
    return np.unique(pattern, return_inverse=True)[1].astype(np.int16)
