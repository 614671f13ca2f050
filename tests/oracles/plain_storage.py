"""A storage in plain Python: a page is a list of 64 things, whatever its tier."""

from ruvmlx.tiers import COLD, HOT, PAGE, WARM


class PlainTable:
    def __init__(self):
        self.rows: dict[int, tuple[int, int]] = {}

    def set(self, index: int, page: int, tier: int) -> None:
        self.rows[index] = page, tier

    def clear(self, index: int) -> None:
        del self.rows[index]

    def share(self, other) -> None:
        pass

    def flush(self) -> None:
        pass

    @property
    def nbytes(self) -> int:
        return 16 * len(self.rows)


class PlainStorage:
    """Counts what is alive, and refuses what a real storage would crash on."""

    layout = "plain"
    background = True
    limit = 0

    def __init__(self):
        self.pages: dict[int, tuple[int, list]] = {}
        self.made = 0
        self.reading: list[int] = []  # by demotions whose result nobody has asked for

    def page_bytes(self, tier: int) -> int:
        return {COLD: 100, WARM: 200, HOT: 400}[tier]

    def _add(self, tier: int, content: list) -> int:
        self.made += 1
        self.pages[self.made] = tier, content
        return self.made

    def is_crowded(self, tier: int, n: int) -> bool:
        return False

    def prepare(self, tier: int, n: int) -> None:
        pass

    def is_sparse(self, tier: int) -> bool:
        return False

    def compact(self, tier: int) -> dict[int, int]:
        return {}

    def make(self, tier: int) -> int:
        return self._add(tier, [None] * PAGE)

    def free(self, page: int, tier: int) -> None:
        assert page not in self.reading, "a page is freed that a demotion still reads"
        assert self.pages.pop(page)[0] == tier

    def copy(self, page: int) -> int:
        tier, content = self.pages[page]
        assert tier == HOT
        return self._add(HOT, list(content))

    def demote(self, pages, tier):
        content = [self.pages[page][1] for page in pages]
        assert tier > COLD and all(self.pages[page][0] == tier for page in pages)
        assert all(token is not None for page in content for token in page), "a page that is not full"
        self.reading += pages
        made = [self._add(tier - 1, list(page)) for page in content]

        def result():
            for page in pages:
                self.reading.remove(page)
            return made

        return result

    def new_table(self) -> PlainTable:
        return PlainTable()

    def write(self, cache, position: int, token) -> None:
        number, tier = cache.table.rows[position // PAGE]
        assert tier == HOT
        self.pages[number][1][position % PAGE] = token

    def read(self, cache) -> list:
        """Tokens of all pages that are still there, None for those that the window has left."""
        out: list = []
        for i in range(-(-cache.offset // PAGE)):
            out += self.pages[cache.table.rows[i][0]][1] if i in cache.table.rows else [None] * PAGE
        return out[: cache.offset]
