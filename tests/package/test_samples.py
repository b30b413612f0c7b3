"""Samples that mirror cuDNN's: scripts and notebooks agree, run, and find their own results right."""

import contextlib
import io
import re
import runpy
import sys
import types

import pytest
import torch

import graphfuse
import sample_notebooks as samples

README = samples.FOLDER / "README.md"
# A script looks for a GPU by itself. The plain tests hide it, so that they are the same wherever they run.
DEVICES = [pytest.param("emulator", marks=pytest.mark.emulate), pytest.param("cuda", marks=pytest.mark.gpu)]

by_script = pytest.mark.parametrize("script", samples.SCRIPTS, ids=lambda path: path.stem)
on_devices = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture
def on(monkeypatch):
    """on(device): samples see this one alone until the test ends, and leave torch's random numbers as they were."""
    with torch.random.fork_rng():

        def on(device):
            if device == "emulator":
                monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
                monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of other processes

        yield on


def hold(told: str, device: str) -> None:
    """It says where it ran, and what came out."""
    (place,) = re.findall(r"^runs on (\w+)", told, re.M)
    assert place == device
    assert len(told.splitlines()) >= 3


@pytest.mark.some(6)
@on_devices
@by_script
def test_script(script, device, on):
    on(device)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        runpy.run_path(str(script), run_name="__main__")
    hold(told.getvalue(), device)


@pytest.mark.emulate
@by_script
def test_cells_of_the_notebook(script, on, monkeypatch):
    """One by one, as Jupyter runs them."""
    import nbformat

    on("emulator")
    module = types.ModuleType(f"sample_{script.stem}")  # where its dataclasses are at home
    monkeypatch.setitem(sys.modules, module.__name__, module)
    notebook = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        for cell in notebook.cells:
            if cell.cell_type == "code":
                exec(compile(cell.source, f"{script.stem}, {cell.id}", "exec"), vars(module))
    hold(told.getvalue(), "emulator")


@pytest.mark.further
@on_devices
def test_a_notebook_in_jupyter(device, on, monkeypatch, tmp_path):
    """In a kernel of its own, where the explanation shows itself as a flowchart."""
    if device == "cuda":  # on machines with a GPU not all that tests need may be installed
        pytest.importorskip("nbclient")
    import nbformat
    from nbclient import NotebookClient

    on(device)
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    notebook = nbformat.read(samples.FOLDER / "00_introduction.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    hold("".join(o.text for o in outputs if o.output_type == "stream"), device)
    (shown,) = (o.data for o in outputs if o.output_type == "execute_result")
    assert shown["text/markdown"].startswith("```mermaid\nflowchart TD")


@by_script
def test_notebooks_are_as_written(script):
    import nbformat

    text = script.with_suffix(".ipynb").read_text()
    assert text == samples.render(script.read_text()), f"run {samples.COMMAND}"
    nbformat.validate(nbformat.reads(text, as_version=4))


def test_no_notebook_without_a_script():
    assert {p.stem for p in samples.FOLDER.glob("*.ipynb")} == {p.stem for p in samples.SCRIPTS}


def test_the_table_has_every_sample():
    named = re.findall(r"^\| \[(\w+)\]\((\w+)\.py\), \[notebook\]\((\w+)\.ipynb\) \|", README.read_text(), re.M)
    assert named == [(p.stem,) * 3 for p in samples.SCRIPTS]


REFUSED = {
    "causal_conv1d_forward": lambda: graphfuse.causal_conv1d_forward,
    "sm_carveout": lambda: graphfuse.pygraph(sm_count=8),
    "general_block_scale_matmul": lambda: graphfuse.data_type.INT4,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_mirrored_says_what_to_use(name):
    """The page has the error's reason."""
    with pytest.raises(graphfuse.GraphfuseError) as error:
        REFUSED[name]()
    _, instead = str(error.value).split("; instead: ", 1)
    table = README.read_text().split("## What is not here")[1]
    assert re.search(rf"^\| `\w+/.*{name}`.* \| {re.escape(instead)}[ ;]", table, re.M)


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "a script begins"),
        ("import torch\n# %%\nx = 1\n", "a script begins"),
        ("# %% [raw]\n# a\n", "'# %% \\[raw\\]' begins no cell"),
        ("# %% [markdown]\n# a\nx = 1\n", "has the line 'x = 1'"),
        ("# %%\n\n# %%\nx = 1\n", "a cell is empty"),
    ],
)
def test_what_is_no_script_of_cells(text, why):
    with pytest.raises(ValueError, match=why):
        samples.cells(text)


def test_cells():
    text = "# %% [markdown]\n# # A\n#\n# b\n\n# %%\nx = '''\n# %\n'''\n\n\n# %%\ny = 2\n"
    assert samples.cells(text) == [("markdown", "# A\n\nb"), ("code", "x = '''\n# %\n'''"), ("code", "y = 2")]
