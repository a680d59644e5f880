"""Finds circles of imports between modules: `python -m tools.import_circles [PACKAGE…]`.

Imports under TYPE_CHECKING and inside functions count: whoever reads one module of a circle has to read them all.
"""

from __future__ import annotations

import sys

from grimp import ImportGraph, build_graph

PACKAGES = ("benchmarks", "cli", "demo_model", "services", "shared", "sim", "sluice_client", "tests", "tools")


def circles_of(graph: ImportGraph) -> list[set[str]]:
    """Find the largest sets of modules in which each imports each other, directly or through others of the set."""
    circles: list[set[str]] = []
    for module in sorted(graph.modules):
        if any(module in circle for circle in circles):
            continue
        both_ways = graph.find_upstream_modules(module) & graph.find_downstream_modules(module)
        if both_ways:
            circles.append(both_ways | {module})
    return circles


def imports_within(graph: ImportGraph, circle: set[str]) -> list[str]:
    """Say every import between modules of a circle, by file position and text."""
    lines = []
    for importer in sorted(circle):
        for imported in sorted(graph.find_modules_directly_imported_by(importer) & circle):
            for found in graph.get_import_details(importer=importer, imported=imported):
                lines.append(f"{importer}:{found['line_number']}: {found['line_contents']}")
    return lines


def main(packages: list[str]) -> int:
    """Print the circles inside some packages, and return 1 if there are any."""
    first, *others = packages or PACKAGES
    graph = build_graph(first, *others, cache_dir=None)
    circles = circles_of(graph)
    for circle in circles:
        print(f"circle of {len(circle)} modules:", *imports_within(graph, circle), sep="\n  ")
    print(f"{len(graph.modules)} modules, {len(circles)} circles of imports")
    return 1 if circles else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
