"""Writes the golden files from the samples; look at the difference before committing it."""

from __future__ import annotations

from tests.unit.golden.samples import FOLDER, golden_files

for file_name, text in golden_files().items():
    (FOLDER / file_name).write_text(text)
