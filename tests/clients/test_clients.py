"""What clients do is what docs/results/clients.md says of them. By `make test-clients`, but for the page itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.__main__ import BEGIN, END, PAGE, run
from tests.clients.catalogue import CLIENTS, ClientProgram
from tests.clients.served import Served, serving
from tests.clients.table import read

QUICK = [client for client in CLIENTS if client.is_quick]
RECORDED = read(PAGE.read_text(encoding="utf-8"), [client.name for client in CLIENTS])


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


@pytest.mark.recipes
@pytest.mark.parametrize("client", QUICK, ids=lambda client: client.name)
def test_a_client_does_what_the_table_says(served: Served, client: ClientProgram) -> None:
    assert (client.environment / ".made").exists(), "`make test-clients` makes its environment"
    outcomes = run(client, served)
    found = {ability: outcome.partition(":")[0] for ability, outcome in outcomes.items()}
    assert found == RECORDED[client.name], outcomes


def test_the_table_has_the_clients_in_the_versions_that_are_installed() -> None:
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    names, _, versions, *_ = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert names[1:] == [client.name for client in CLIENTS]
    assert versions[1:] == [client.version for client in CLIENTS]
