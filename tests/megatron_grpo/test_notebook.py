"""docs/python.ipynb runs as Jupyter runs it."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs" / "python.ipynb"


def outputs(notebook: nbformat.NotebookNode) -> list[list[str | set[str]]]:
    """Kind of each output of each cell: the name of a stream, or the formats of a value."""
    return [
        [each.get("name") or {*each.data} for each in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_notebook_trains_with_two_losses_and_shows_what_is_committed(tmp_path):
    committed, notebook = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    for folder in ("configs", "demo", "tests"):
        (tmp_path / folder).symlink_to(NOTEBOOK.parents[1] / folder)
    (tmp_path / "docs").mkdir()  # the kernel starts in the notebook's folder
    place = {"metadata": {"path": tmp_path / "docs"}}
    NotebookClient(notebook, resources=place, coalesce_streams=True).execute()
    assert outputs(notebook) == outputs(committed)
