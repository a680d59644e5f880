"""Names of the full blocks of each sequence (`shared.prefix_names`), made when somebody asks for them."""

from __future__ import annotations

from services.worker.sequences.assemble import known_tokens
from services.worker.sequences.table import SequenceTable
from services.worker.sequences.token_log import TokenLog
from shared.prefix_names import RunName, following_names, root_name


class RowNames:
    """By row; a name takes 0.4 µs to make."""

    def __init__(self, table: SequenceTable, log: TokenLog, block_size: int, *, are_shared: bool) -> None:
        """Begin without rows; names are those of equal tokens and salts, or, if not shared, of one sequence alone."""
        self.are_shared = are_shared
        self._table = table
        self._log = log
        self._block_size = block_size
        self._names: dict[int, list[RunName]] = {}

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self._names)

    def add(self, row: int, salt: str, parent: int | None) -> None:
        """Take in a new row, whose prompt may be that of another one."""
        names = [root_name(salt if self.are_shared else f"{self._table.order[row]} {salt}")]
        if parent is not None and self.are_shared:
            names += self.made(parent)[: int(self._table.num_prompt[row]) // self._block_size]
        self._names[row] = names

    def of(self, row: int, num_blocks: int) -> list[RunName]:
        """Return the names of a row's first blocks; their tokens are known."""
        names, size = self._names[row], self._block_size
        made = len(names) - 1
        if num_blocks > made:
            tokens = known_tokens(self._table, self._log, row, made * size, (num_blocks - made) * size)
            names += following_names(names[-1], tokens.tobytes(), size)
        return names[1 : num_blocks + 1]

    def made(self, row: int) -> list[RunName]:
        """Return all names of a row that have been made."""
        return self._names[row][1:]

    def forget(self, row: int) -> None:
        """Forget a row that ends."""
        self._names.pop(row, None)
