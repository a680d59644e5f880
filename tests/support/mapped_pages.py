"""The pages of a worker's memory as the operating system lists them: what no ledger of ours can get wrong."""

from __future__ import annotations

from pathlib import Path

from services.planner.policy.plans.capacity import CapacityRule
from services.planner.policy.plans.drop_facts import ModelFacts
from shared.layers import LayerRange
from shared.messages.report import ElasticFacts, WorkerReport

MEMORY_NAME = "memfd:sluice-memory"


def mapped_pages(page_bytes: int, *, process: int | str = "self", inode: int | None = None) -> list[int]:
    """Return the pages of a process's memory file that are mapped, in order of their addresses.

    Args:
        page_bytes: of a page.
        process: its id.
        inode: of the file; None: the process has but one.
    """
    return [page for number, page in file_pages(page_bytes, process=process) if inode in (None, number)]


def file_pages(page_bytes: int, *, process: int | str = "self") -> list[tuple[int, int]]:
    """Return the pages of memory files that a process has mapped, each with its file's inode, by their addresses."""
    pages: list[tuple[int, int]] = []
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        if MEMORY_NAME not in line:
            continue
        addresses, _, offset, _, number, *_ = line.split()
        begin, end = (int(part, 16) for part in addresses.split("-"))
        first = int(offset, 16) // page_bytes
        pages += [(int(number), page) for page in range(first, first + (end - begin) // page_bytes)]
    return pages


def rule_of(facts: ElasticFacts, block_size: int) -> CapacityRule:
    """Return what a planner knows of a worker's memory."""
    other = {"num_pages", "max_blocks", "link_bytes_per_s", "has_host_copy", "digest"}
    return CapacityRule(ModelFacts(**facts.model_dump(exclude=other), block_size=block_size))


def check_process(report: WorkerReport) -> set[tuple[int, int]]:
    """Check that a worker's process has mapped what it should have by its report, each page once and none besides.

    Nothing may be changing there.

    Returns:
        The pages that it has mapped, with their files: no other worker has one of them.
    """
    facts = report.elastic
    assert facts is not None
    layers, rule = LayerRange(*report.layers), rule_of(facts, report.block_size)
    num_blocks = rule.blocks(layers, facts.num_pages, facts.max_blocks)
    num_kv = 2 * len(layers) * -(-num_blocks * facts.block_bytes // facts.page_bytes)
    num_parameters = rule.parameter_pages(layers)
    mapped = file_pages(facts.page_bytes, process=report.pid)
    assert len(mapped) == len(set(mapped)), f"{report.worker_id} has mapped a page twice"
    assert len(mapped) == num_parameters + num_kv <= facts.num_pages, f"{report.worker_id} of {layers}: {len(mapped)}"
    if len({inode for inode, _ in mapped}) == 1:  # pages of others are numbered by theirs
        assert max(page for _, page in mapped) < facts.num_pages, f"{report.worker_id} has mapped a page beyond its own"
    return set(mapped)
